"""The index's page is README.md without its pictures and with links within the repository as plain text: the index has
neither. All else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

page = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
page = re.sub(r"!\[[^]]*\]\((?!https://)[^)]*\)\n+", "", page)
page = re.sub(r"\[([^]]*)\]\((?!https://)[^)]*\)", r"\1", page)
setup(long_description=page, long_description_content_type="text/markdown")
