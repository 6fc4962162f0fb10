"""RMSNorm and LayerNorm fused with the quantization of their output (COAT section 5.2, "Group Scaling").

    RMSNorm     xhat = x * rstd,            rstd = (mean(x^2) + eps)^(-1/2)
    LayerNorm   xhat = (x - mean) * rstd,   rstd = (mean((x - mean)^2) + eps)^(-1/2)
    y = xhat * weight + bias                (weight and bias may be absent: OLMo 1)

The output goes straight into an FP8 GEMM, so it needs max |y| before the first element can be written. Group Scaling
finds it in two stages: one pass computes the statistics AND each row's max |y|; the maximum of those T numbers is the
tensor's. A second pass writes y in FP8; y in BF16 never reaches memory.

For the backward the second pass also writes xhat in 8-bit groups. Keeping xhat, not y, costs the same bytes and no
division by a weight that may be tiny or zero: y^T is rebuilt as xhat * weight + bias, dweight = sum_T dy * xhat, and

    g = dy * weight
    dx = rstd * (g - xhat * mean(g * xhat) [- mean(g), LayerNorm]) + dresidual

Legend: T tokens, H hidden, G group size, n = ceil(H / G).
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.catalogue import op
from overcoat.formats import E4M3, Quantized, decode_groups, encode_groups, group_code, quantize_tensor
from overcoat.kernels import gpu


def normalize(x: Tensor, mean: Optional[Tensor], rstd: Tensor) -> Tensor:
    x = x.float()
    if mean is not None:
        x = x - mean[:, None]
    return x * rstd[:, None]


def affine(xhat: Tensor, weight: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:
    y = xhat if weight is None else xhat * weight.float()
    return y if bias is None else y + bias.float()


def sum_like(y: Tensor, residual: Tensor) -> Tensor:
    """An empty tensor for residual + y."""
    return y.new_empty(y.shape, dtype=torch.result_type(y, residual))


@op
def rmsnorm_stats(x: Tensor, weight: Optional[Tensor], eps: float) -> Tuple[Tensor, Tensor]:
    """Statistics of RMSNorm: rstd (T,) FP32 and each row's max |y| (T,) FP32 of x (T, H)."""
    x = x.contiguous()
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    return rstd, affine(normalize(x, None, rstd), weight, None).abs().amax(-1)


@rmsnorm_stats.fake
def _(x, weight, eps):
    return x.new_empty(x.shape[:1], dtype=torch.float32), x.new_empty(x.shape[:1], dtype=torch.float32)


@rmsnorm_stats.cuda
def _(x, weight, eps):
    return gpu.norm.stats(x, weight, None, eps, False)[1:]


@op
def add_rmsnorm_stats(
    y: Tensor, residual: Tensor, weight: Optional[Tensor], eps: float
) -> Tuple[Tensor, Tensor, Tensor]:
    """x = residual + y (T, H), and `rmsnorm_stats` of x: the residual stream is written and read in one pass."""
    x = (residual + y).contiguous()
    return x, *rmsnorm_stats.reference(x, weight, eps)


@add_rmsnorm_stats.fake
def _(y, residual, weight, eps):
    return sum_like(y, residual), *(y.new_empty(y.shape[:1], dtype=torch.float32) for _ in range(2))


@add_rmsnorm_stats.cuda
def _(y, residual, weight, eps):
    if y.dtype != residual.dtype:
        return add_rmsnorm_stats.reference(y, residual, weight, eps)
    x, _, rstd, row_amax = gpu.norm.add_stats(y, residual, weight, None, eps, False)
    return x, rstd, row_amax


@op
def layernorm_stats(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float
) -> Tuple[Tensor, Tensor, Tensor]:
    """Statistics of LayerNorm: mean, rstd and each row's max |y|, each (T,) FP32, of x (T, H)."""
    wide = x.contiguous().float()
    mean = wide.mean(-1)
    rstd = torch.rsqrt((wide - mean[:, None]).square().mean(-1) + eps)
    return mean, rstd, affine(normalize(wide, mean, rstd), weight, bias).abs().amax(-1)


@layernorm_stats.fake
def _(x, weight, bias, eps):
    return tuple(x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(3))


@layernorm_stats.cuda
def _(x, weight, bias, eps):
    return gpu.norm.stats(x, weight, bias, eps, True)


@op
def add_layernorm_stats(
    y: Tensor, residual: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """x = residual + y (T, H), and `layernorm_stats` of x: the residual stream is written and read in one pass."""
    x = (residual + y).contiguous()
    return x, *layernorm_stats.reference(x, weight, bias, eps)


@add_layernorm_stats.fake
def _(y, residual, weight, bias, eps):
    return sum_like(y, residual), *(y.new_empty(y.shape[:1], dtype=torch.float32) for _ in range(3))


@add_layernorm_stats.cuda
def _(y, residual, weight, bias, eps):
    if y.dtype != residual.dtype:
        return add_layernorm_stats.reference(y, residual, weight, bias, eps)
    return gpu.norm.add_stats(y, residual, weight, bias, eps, True)


@op
def norm_quantize(
    x: Tensor,
    mean: Optional[Tensor],
    rstd: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    amax: Tensor,
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write the norm's output as GEMM operand, and its normalised input as kept codes.

    Args:
        x: (T, H); mean: (T,) or None (RMSNorm); rstd: (T,); weight, bias: (H,) or None.
        amax: 0-d FP32, max |y| over the tensor.

    Returns:
        y in E4M3 (T, H); its 0-d FP32 scale; codes of xhat (T, H); their BF16 group maxima (T, n).
    """
    xhat = normalize(x.contiguous(), mean, rstd)
    data, scale = quantize_tensor(affine(xhat, weight, bias), E4M3, amax)
    codes, group_amax = encode_groups(xhat, code, group_size)
    return data, scale, codes, group_amax


@norm_quantize.fake
def _(x, mean, rstd, weight, bias, amax, code, group_size):
    groups = (x.shape[1] + group_size - 1) // group_size
    return (
        x.new_empty(x.shape, dtype=E4M3.dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty(x.shape, dtype=group_code(code).dtype),
        x.new_empty((x.shape[0], groups), dtype=torch.bfloat16),
    )


@norm_quantize.cuda
def _(x, mean, rstd, weight, bias, amax, code, group_size):
    return gpu.norm.norm_quantize(x, mean, rstd, weight, bias, amax, code, group_size)


@op
def norm_backward(
    dy: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    rstd: Tensor,
    weight: Optional[Tensor],
    dresidual: Optional[Tensor],
    centered: bool,
    has_bias: bool,
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward of the norm, with the residual branch's gradient added in the same pass.

    Args:
        dy: (T, H), gradient of y.
        codes, group_amax: kept xhat; rstd: (T,) FP32; weight: (H,) or None.
        dresidual: (T, H), gradient of x from its other use, or None.
        centered: True for LayerNorm.
        has_bias: whether the norm has a bias.

    Returns:
        dx (T, H) of dy's dtype; dweight (H,), summed in FP32, of the weight's dtype; dbias (H,) FP32, empty without a
        bias; max |dx|, 0-d FP32, for the product that reads dx next.
    """
    xhat = decode_groups(Quantized(codes, group_amax), code, group_size)
    wide = dy.contiguous().float()
    g = wide if weight is None else wide * weight.float()
    dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if centered:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd[:, None]
    if dresidual is not None:
        dx = dx + dresidual.float()
    dx = dx.to(dy.dtype)
    dweight = (wide * xhat).sum(0).to(torch.float32 if weight is None else weight.dtype)
    return dx, dweight, wide.sum(0) if has_bias else wide.new_empty(0), dx.abs().amax().float()


@norm_backward.fake
def _(dy, codes, group_amax, rstd, weight, dresidual, centered, has_bias, code, group_size):
    dweight = dy.new_empty(dy.shape[1:], dtype=torch.float32 if weight is None else weight.dtype)
    dbias = dy.new_empty(dy.shape[1] if has_bias else 0, dtype=torch.float32)
    return dy.new_empty(dy.shape), dweight, dbias, dy.new_empty((), dtype=torch.float32)


@norm_backward.cuda
def _(dy, codes, group_amax, rstd, weight, dresidual, centered, has_bias, code, group_size):
    return gpu.norm.norm_backward(dy, codes, group_amax, rstd, weight, dresidual, centered, has_bias, code, group_size)
