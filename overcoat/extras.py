"""Optional packages are imported where they are needed; what goes wrong there is one clear sentence."""

from __future__ import annotations

import contextlib
import gc
import importlib
import textwrap
from collections.abc import Iterator
from typing import Any


def load_extra(module: str, extra: str, purpose: str) -> Any:
    """Import `module`, which `pip install 'overcoat[extra]'` brings, for `purpose`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise  # the package is there; something it needs is broken, and that message says more
        raise ValueError(
            f"{purpose} needs the package {module.split('.')[0]!r}: pip install 'overcoat[{extra}]'"
        ) from error


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around large imports: their objects stay, and looking for garbage among them takes a third of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def reason(error: BaseException) -> str:
    """Why, in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return textwrap.shorten(text, 300, placeholder=" ...")
