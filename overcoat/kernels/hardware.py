"""log2, exp2, sqrt, 1/x and x y + z as a GPU has them: one instruction each.

The optimizer's step has a budget of about a hundred instructions per parameter; an exactly rounded division or root
costs a dozen. So the kernel uses the approximate instructions, and so does the reference when it runs on a GPU, which
makes the two comparable bit for bit. On a CPU these are PyTorch's functions. They are the only place where devices
differ: by some 2^-22 of a value, so a stored code may differ in a near tie. `fma` is exact but for its one rounding; on
a CPU it goes through FP64, whose own rounding changes the result's in one case of some 2^28.

    log2         lg2.approx.ftz      exact at 1; -inf at 0
    exp2         ex2.approx.ftz      exact at 0; 0 at -inf
    sqrt         sqrt.approx.ftz
    reciprocal   rcp.approx.ftz      inf at 0
    fma          fma.rn              x y + z, rounded once

"ftz": on a GPU denormal inputs and results count as zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overcoat.kernels import instructions
from overcoat.kernels.language import triton
from overcoat.kernels.op import op


@op
def log2(x: Tensor) -> Tensor:
    """Base-2 logarithm of an FP32 tensor."""
    return torch.log2(x.contiguous())


@op
def exp2(x: Tensor) -> Tensor:
    """2^x of an FP32 tensor."""
    return torch.exp2(x.contiguous())


@op
def sqrt(x: Tensor) -> Tensor:
    """Square root of an FP32 tensor."""
    return torch.sqrt(x.contiguous())


@op
def reciprocal(x: Tensor) -> Tensor:
    """1 / x of an FP32 tensor."""
    return torch.reciprocal(x.contiguous())


@op
def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x y + z of FP32 tensors that broadcast together, rounded once."""
    return torch.addcmul(z.double(), x.double(), y.double()).float().contiguous()


if triton:  # without it a GPU runs the references
    fma.cuda(instructions.multiply_add)
    for _op, _instruction in (
        (log2, instructions.log2),
        (exp2, instructions.exp2),
        (sqrt, instructions.sqrt),
        (reciprocal, instructions.reciprocal),
    ):
        _op.cuda(instructions.elementwise(_instruction))
