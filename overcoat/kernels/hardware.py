"""log2, exp2, sqrt, 1/sqrt(x), 1/x and x y + z as ops that use the GPU's own instruction for each.

The optimizer's step has a budget of about a hundred instructions per parameter; an exactly rounded division or root
costs a dozen. So kernels use the approximate instructions, and references on a GPU use the same: both give the same
bits. On a CPU these are PyTorch's functions. This is the only place where devices differ: by about 2^-22 of a value, so
a stored code may differ in a near tie. `fma` goes through FP64 on a CPU, which changes one result in about 2^28.

    log2         lg2.approx.ftz      exact at 1; -inf at 0
    exp2         ex2.approx.ftz      exact at 0; 0 at -inf
    sqrt         sqrt.approx.ftz
    rsqrt        rsqrt.approx.ftz     inf at 0
    reciprocal   rcp.approx.ftz      inf at 0
    fma          fma.rn              x y + z, rounded once

"ftz": on a GPU denormal inputs and results count as zero.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch import Tensor

from overcoat.kernels import instructions
from overcoat.kernels.language import triton
from overcoat.kernels.op import Op, op

LOG2E = math.log2(math.e)  # exp(x) = exp2(x * LOG2E)


def _elementwise(exact: Callable[[Tensor], Tensor], instruction: Any) -> Op:
    """Return the op of one FP32 argument with the name of PyTorch's function `exact`."""

    def reference(x: Tensor) -> Tensor:
        return exact(x.contiguous())

    reference.__name__ = exact.__name__
    made: Op = op(reference)
    if triton:  # without it a GPU runs the references
        made.cuda(instructions.elementwise(instruction))
    return made


log2 = _elementwise(torch.log2, instructions.log2)
exp2 = _elementwise(torch.exp2, instructions.exp2)
sqrt = _elementwise(torch.sqrt, instructions.sqrt)
rsqrt = _elementwise(torch.rsqrt, instructions.rsqrt)
reciprocal = _elementwise(torch.reciprocal, instructions.reciprocal)


@op
def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return x y + z of FP32 tensors that broadcast together, rounded once."""
    return torch.addcmul(z.double(), x.double(), y.double()).float().contiguous()


if triton:
    fma.cuda(instructions.elementwise(instructions.fma))
