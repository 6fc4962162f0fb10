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
    from overcoat.kernels.gpu import (
        blockwise as blockwise,
    )
    from overcoat.kernels.gpu import (
        blockwise_backward as blockwise_backward,
    )
    from overcoat.kernels.gpu import (
        blockwise_fused as blockwise_fused,
    )
    from overcoat.kernels.gpu import (
        gelu as gelu,
    )
    from overcoat.kernels.gpu import (
        gelu_backward as gelu_backward,
    )
    from overcoat.kernels.gpu import (
        gelu_blockwise as gelu_blockwise,
    )
    from overcoat.kernels.gpu import (
        groups as groups,
    )
    from overcoat.kernels.gpu import (
        loss as loss,
    )
    from overcoat.kernels.gpu import (
        norm as norm,
    )
    from overcoat.kernels.gpu import (
        quantize as quantize,
    )
    from overcoat.kernels.gpu import (
        rope as rope,
    )
    from overcoat.kernels.gpu import (
        rope_backward as rope_backward,
    )
    from overcoat.kernels.gpu import (
        rope_norm_backward as rope_norm_backward,
    )
    from overcoat.kernels.gpu import (
        stack as stack,
    )
    from overcoat.kernels.gpu import (
        stack_guessed as stack_guessed,
    )
    from overcoat.kernels.gpu import (
        swiglu as swiglu,
    )
    from overcoat.kernels.gpu import (
        swiglu_backward as swiglu_backward,
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
