"""The Triton kernels of swiglu.py, gelu.py, gelu_blockwise.py and blockwise_fused.py, imported when first asked for."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overcoat.kernels.gpu import (  # noqa: F401  what `__getattr__` imports, for readers and type checkers
        blockwise_backward,
        blockwise_fused,
        gelu,
        gelu_backward,
        gelu_blockwise,
        swiglu,
        swiglu_backward,
    )


def __getattr__(name: str) -> ModuleType:
    """A module of this package; once imported it is an attribute like any other."""
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"{__name__}.{name}":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        raise
