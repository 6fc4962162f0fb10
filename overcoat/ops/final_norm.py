"""`final_norm`: the RMSNorm before lm_head. Keeps its input as it is, and a number for each token."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from overcoat.kernels import final_norm as kernels
from overcoat.memory import keep


class _FinalNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = kernels.final_norm(x, weight, eps)
        keep(ctx, "final_norm", x=x, rstd=rstd, weight=weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        x, rstd, weight = ctx.saved_tensors
        return *kernels.final_norm_backward(dy, x, rstd, weight), None


def final_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * (mean(x^2) + eps)^(-1/2) * weight over the last dimension.

    Args:
        x: (..., H); weight: (H,), of the same dtype.

    Returns:
        (..., H) in that dtype, rounded once.
    """
    return _FinalNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
