"""`python -m overcoat`."""

import sys

from overcoat.cli import main

sys.exit(main())
