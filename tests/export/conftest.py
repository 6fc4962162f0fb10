"""A tiny model with its tokenizer in a folder: that of `tests/eval`."""

from tests.eval.conftest import folder

__all__ = ["folder"]
