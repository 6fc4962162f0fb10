"""Optional packages are imported where they are needed, and a missing one is one clear sentence."""

from __future__ import annotations

import importlib
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
