"""BF16 products on a CPU without AVX-512: PyTorch's own take 7 to 30 times as long as FP32's, and most of many tests.

They are computed in FP32 and rounded once, as oneDNN does where there is AVX-512.
"""

from __future__ import annotations

import warnings
from typing import Any, Optional

import torch
from torch import Tensor

_library: Any = None  # whose overrides last as long as it does


def compute_in_fp32(*names: str) -> None:
    """Products of BF16 by these operators of ATen on the CPU, and by those that write them elsewhere."""
    global _library
    if _library is not None or torch.backends.cpu.get_cpu_capability() == "AVX512":
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an override
        for name in names:
            for place in ("", ".out"):
                _library.impl(name + place, _in_fp32(name, place), "CPU", with_keyset=True, allow_override=True)
        _library.impl("addmm_", _in_fp32("addmm", "_"), "CPU", with_keyset=True, allow_override=True)


def compute_as_users_do() -> None:
    """PyTorch's own products again: where the numbers are compared with those of a process that runs no tests."""
    global _library
    _library = None


def _in_fp32(name: str, place: str) -> Any:
    plain, kernel = (torch.library.get_kernel(f"aten::{each}", "CPU") for each in (name, name + place))

    def product(keys: Any, *operands: Tensor, out: Optional[Tensor] = None, **options: Any) -> Tensor:
        into = {} if out is None else {"out": out}
        if operands[-1].dtype != torch.bfloat16:
            return kernel.call_boxed(keys, *operands, **into, **options)
        found = plain.call_boxed(keys, *(each.float() for each in operands), **options)
        if place == "":
            return found.bfloat16()
        return (operands[0] if out is None else out).copy_(found)

    return product


compute_in_fp32("mm", "addmm", "bmm")
