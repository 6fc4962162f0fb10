"""A permanent attack on `overcoat train` and the library: `python -m tests.attack` (see __main__.py)."""
