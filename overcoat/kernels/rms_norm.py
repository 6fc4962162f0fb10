"""RMSNorm in the model's own dtype, read by no FP8 product: the norm at a model's end, and OLMo 2's of q and k.

    y  = x * rstd * weight,                  rstd = (mean(x^2) + eps)^(-1/2)
    dx = rstd * (g - xhat * mean(g * xhat)),   g = dy * weight, xhat = x * rstd
    dweight = sum_T dy * xhat

On a GPU these are the kernels of `F.rms_norm`. That function itself would keep x in FP32, three times, on the meta
device, where memory is estimated, and on a CPU.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from overcoat.kernels.norm import affine, normalize, statistics
from overcoat.kernels.op import op


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tuple[Tensor, Tensor]:
    """RMSNorm of x (T, H) with weight (H,) of x's dtype: y in that dtype, rstd (T,) FP32."""
    _, rstd = statistics(x, eps, False)
    return affine(normalize(x.contiguous(), None, rstd), weight, None).to(x.dtype), rstd


@rms_norm.cuda
def _(x, weight, eps):
    y, rstd = torch.ops.aten._fused_rms_norm(x.contiguous(), [x.shape[1]], weight, eps)
    return y, rstd.view(-1)


@op
def rms_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
    """Gradients of x (T, H) and of weight (H,), in their dtype, from dy (T, H), x and rstd (T,)."""
    xhat, wide = normalize(x.contiguous(), None, rstd), dy.contiguous().float()
    g = wide * weight.float()
    dx = rstd[:, None] * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx.to(x.dtype), (wide * xhat).sum(0).to(weight.dtype)


@rms_norm_backward.fake
def _(dy, x, rstd, weight):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@rms_norm_backward.cuda
def _(dy, x, rstd, weight):
    arguments = (dy.contiguous(), x.contiguous(), [x.shape[1]], rstd.contiguous().view(-1, 1), weight)
    return torch.ops.aten._fused_rms_norm_backward(*arguments, [True, True])
