"""The Triton kernels of the op catalogue, one file per op family, named as the references in `overcoat.kernels`.

`gpu.norm` is imported when it is first asked for, which is when an op meets a CUDA tensor: Triton is absent on machines
without a GPU. Only `cublaslt.py` and `gemm_tiles.py` do without it. `common.py` has what the kernels share; each other
file holds kernels, each followed by its launcher. A launcher takes and returns what its op does; the op's reference is
the specification, and the kernel equals it bit for bit unless its docstring says otherwise.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overcoat.kernels.gpu import (  # noqa: F401  what `__getattr__` imports, for readers and type checkers
        blockwise,
        blockwise_backward,
        blockwise_fused,
        gelu,
        gelu_backward,
        gelu_blockwise,
        groups,
        loss,
        norm,
        quantize,
        rope,
        rope_backward,
        rope_norm_backward,
        stack,
        stack_guessed,
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
