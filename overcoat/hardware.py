"""log2, exp2, sqrt and 1/x as a GPU has them: one instruction each, right to about 2^-22.

The optimizer's step has a budget of about a hundred instructions per parameter; an exactly rounded division or root
costs a dozen. So the kernel uses the approximate instructions, and so does the reference when it runs on a GPU, which
makes the two comparable bit for bit. On a CPU these are PyTorch's functions. They are the only place where devices
differ: by some 2^-22 of a value, so a stored code may differ in a near tie.

    log2         lg2.approx.ftz      exact at 1; -inf at 0
    exp2         ex2.approx.ftz      exact at 0; 0 at -inf
    sqrt         sqrt.approx.ftz
    reciprocal   rcp.approx.ftz      inf at 0

"ftz": on a GPU denormal inputs and results count as zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overcoat.catalogue import op


@op
def log2(x: Tensor) -> Tensor:
    """Base-2 logarithm of an FP32 tensor."""
    return torch.log2(x)


@op
def exp2(x: Tensor) -> Tensor:
    """2^x of an FP32 tensor."""
    return torch.exp2(x)


@op
def sqrt(x: Tensor) -> Tensor:
    """Square root of an FP32 tensor."""
    return torch.sqrt(x)


@op
def reciprocal(x: Tensor) -> Tensor:
    """1 / x of an FP32 tensor."""
    return torch.reciprocal(x)


def _same(x: Tensor) -> Tensor:
    return torch.empty_like(x)


for _function in (log2, exp2, sqrt, reciprocal):
    _function.fake(_same)
