"""Optional packages are imported where they are needed; what goes wrong there is one clear sentence."""

from __future__ import annotations

import contextlib
import gc
import importlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
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


@contextlib.contextmanager
def drawing(path: Path, extra: str, purpose: str, width: float, height: float) -> Iterator[Any]:
    """The axes of an image (inches), which is written at the end; ValueError: matplotlib is not installed."""
    load_extra("matplotlib", extra, purpose).use("Agg")
    pyplot = load_extra("matplotlib.pyplot", extra, purpose)
    figure, axes = pyplot.subplots(figsize=(width, height), dpi=120)
    yield axes
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def reason(error: BaseException) -> str:
    """Why, in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return textwrap.shorten(text, 300, placeholder=" ...")
