"""BF16 matrix products on a CPU without AVX-512, where PyTorch's are 5 to 200 times slower than FP32.

They are computed in FP32 and rounded once, as oneDNN does with AVX-512. The commands and the tests enable it;
`import overcoat` does not.
"""

from __future__ import annotations

import warnings
from typing import Any, Optional

import torch
from torch import Tensor

_library: Any = None  # whose overrides last as long as it does


def compute_in_fp32() -> bool:
    """Compute BF16 mm, addmm and bmm on the CPU in FP32, from now on in the whole process. Return False, and change
    nothing, unless AVX2 is the CPU's best instruction set."""
    global _library
    if _library is not None:
        return True
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return False
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an override
        for name in ("mm", "addmm", "bmm"):
            for place in ("", ".out"):
                _library.impl(name + place, _in_fp32(name, place), "CPU", with_keyset=True, allow_override=True)
        _library.impl("addmm_", _in_fp32("addmm", "_"), "CPU", with_keyset=True, allow_override=True)
    return True


def _in_fp32(name: str, place: str) -> Any:
    plain, kernel = (torch.library.get_kernel(f"aten::{each}", "CPU") for each in (name, name + place))

    def product(keys: Any, *operands: Tensor, out: Optional[Tensor] = None, **options: Any) -> Tensor:
        into = {} if out is None else {"out": out}
        if any(each.dtype != torch.bfloat16 for each in (*operands, *into.values())):
            return kernel.call_boxed(keys, *operands, **into, **options)
        found = plain.call_boxed(keys, *(each.float() for each in operands), **options)
        if place == "":
            return found.bfloat16()
        return (operands[0] if out is None else out.resize_(found.shape)).copy_(found)

    return product
