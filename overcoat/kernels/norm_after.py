"""A norm after a branch's output layer (OLMo 2, Gemma 2): residual + norm(y) in one pass, with what its backward reads.

Bytes moved, with U = T * H * 2: 3.5 U (reads y and the residual, writes the sum and codes). Sums over a row are taken
in another order than PyTorch's, so rstd, and with it codes and the sum, may differ from the reference's by a last bit.

Legend: T tokens, H hidden, G group size, GP = G rounded up to a power of 2, n = ceil(H / G).
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import encode_groups, group_code
from overcoat.kernels.codes import CODES, encode
from overcoat.kernels.device import EXACT, max_magnitude, power_of_2
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, dense, kernel, on_device
from overcoat.kernels.norm import affine, normalize, row_warps, sum_like
from overcoat.kernels.op import op

# Elements of a row that one thread holds.
ROW_ELEMENTS = 8


@op
def add_norm_encode(
    y: Tensor,
    residual: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    centered: bool,
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """A norm after a branch's output layer: residual + norm(y), rounded once, and what its backward reads.

    Args:
        y, residual: (T, H); weight, bias: (H,) or None; centered: True for LayerNorm.

    Returns:
        the sum (T, H); codes of the normalised y (T, H); their BF16 group maxima (T, n); rstd (T,) FP32.
    """
    wide, mean = y.contiguous().float(), None
    if centered:
        mean = wide.mean(-1)
        rstd = torch.rsqrt((wide - mean[:, None]).square().mean(-1) + eps)
    else:
        rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    xhat = normalize(wide, mean, rstd)
    total = residual.contiguous().float() + affine(xhat, weight, bias)
    return total.to(torch.result_type(y, residual)), *encode_groups(xhat, code, group_size), rstd


@add_norm_encode.fake
def _(y, residual, weight, bias, eps, centered, code, group_size):
    groups = (y.shape[1] + group_size - 1) // group_size
    return (
        sum_like(y, residual),
        y.new_empty(y.shape, dtype=group_code(code).dtype),
        y.new_empty((y.shape[0], groups), dtype=torch.bfloat16),
        y.new_empty(y.shape[:1], dtype=torch.float32),
    )


@kernel
def _add_norm_encode_kernel(
    y_ptr,  # (T, H)
    residual_ptr,  # (T, H)
    weight_ptr,  # (H,), if HAS_WEIGHT
    bias_ptr,  # (H,), if HAS_BIAS
    sum_ptr,  # (T, H)
    codes_ptr,  # (T, H) 8-bit
    group_amax_ptr,  # (T, n) BF16
    rstd_ptr,  # (T,) FP32
    eps,
    n,
    H: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    NGP: tl.constexpr,  # n rounded up to a power of 2
    CODE: tl.constexpr,
):
    row, g = tl.program_id(0).to(tl.int64), tl.arange(0, NGP)
    h = g[:, None] * G + tl.arange(0, GP)[None, :]
    inside = (h < H) & (tl.arange(0, GP) < G)[None, :]
    y = tl.load(y_ptr + row * H + h, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        y = tl.where(inside, y - tl.sum(tl.sum(y, 1), 0) / H, 0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(y * y, 1), 0) / H + eps)
    tl.store(rstd_ptr + row, rstd)
    xhat = y * rstd
    group_amax = max_magnitude(xhat, 1).to(tl.bfloat16)
    tl.store(group_amax_ptr + row * n + g, group_amax, mask=g < n)
    tl.store(codes_ptr + row * H + h, encode(xhat, group_amax.to(tl.float32)[:, None], CODE), mask=inside)
    total = xhat
    if HAS_WEIGHT:
        total = total * tl.load(weight_ptr + h, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total = total + tl.load(bias_ptr + h, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(residual_ptr + row * H + h, mask=inside, other=0.0).to(tl.float32) + total
    tl.store(sum_ptr + row * H + h, total.to(sum_ptr.dtype.element_ty), mask=inside)


@add_norm_encode.cuda
def _(y, residual, weight, bias, eps, centered, code, group_size):
    if y.dtype != residual.dtype:
        return add_norm_encode.reference(y, residual, weight, bias, eps, centered, code, group_size)
    y, residual, weight, bias = dense(y, residual, weight, bias)
    tokens, hidden = y.shape
    n, gp = cdiv(hidden, group_size), power_of_2(group_size)
    padded = power_of_2(n)
    total, rstd = torch.empty_like(y), torch.empty(tokens, dtype=torch.float32, device=y.device)
    codes = torch.empty(y.shape, dtype=group_code(code).dtype, device=y.device)
    group_amax = torch.empty((tokens, n), dtype=torch.bfloat16, device=y.device)
    with on_device(y):
        _add_norm_encode_kernel[(tokens,)](
            y, residual, y if weight is None else weight, y if bias is None else bias,
            total, codes, group_amax, rstd, eps, n, hidden,
            centered, weight is not None, bias is not None, group_size, gp, padded, CODES[code],
            num_warps=row_warps(padded * gp, ROW_ELEMENTS), **EXACT,
        )  # fmt: skip
    return total, codes, group_amax, rstd
