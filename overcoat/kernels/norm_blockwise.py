"""RMSNorm and LayerNorm straight to FP8 blocks: statistics, output and kept codes in one pass.

With one scale per tensor (norm.py) it takes two passes, the first for the tensor's maximum. A block's maximum is at
hand where its values are. Bytes moved, with U = T * H * 2: 1 U read, 1/2 U of y and 1/2 U of codes written; with a sum
1 U more of each.

Sums over a row are taken in another order than PyTorch's, so rstd may differ in its last bits; given rstd (and the
mean), all else equals the reference bit for bit. Kept codes are those of norm.py.

Legend and layouts of operands: blockwise.py; H hidden, n = ceil(H / G) groups.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import E4M3, encode_groups, group_code
from overcoat.kernels.blockwise import BLOCK, blocks, empty_rows, row_blocks
from overcoat.kernels.codes import CODES, encode
from overcoat.kernels.device import EXACT, inverse_max, max_magnitude, power_of_2, scale_of, to_float8
from overcoat.kernels.instructions import reciprocal
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense, kernel, on_device
from overcoat.kernels.norm import affine, layernorm_stats, normalize, rmsnorm_stats, sum_like
from overcoat.kernels.op import op

# Elements of a row that one thread holds.
NORM_ELEMENTS = 16


def norm_from_statistics(
    x: Tensor,
    mean: Optional[Tensor],
    rstd: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm's output in 1x128 blocks and the kept codes of xhat, given mean (T,) or None and rstd (T,)."""
    xhat = normalize(x, mean, rstd)
    return *row_blocks(affine(xhat, weight, bias), E4M3), *encode_groups(xhat, code, group_size)


@op
def norm_block_quantize(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    centered: bool,
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """RMSNorm, or LayerNorm if `centered`, as GEMM operand and kept codes, in one pass over x.

    Args:
        x: (T, H); weight, bias: (H,) or None.

    Returns:
        y in E4M3 (T, H) and its scale (ceil(H / 128), T); codes of xhat (T, H) and their BF16 group maxima (T, n);
        rstd (T,) FP32.
    """
    x = x.contiguous()
    if centered:
        mean, rstd, _ = layernorm_stats.reference(x, weight, bias, eps)
    else:
        mean, (rstd, _) = None, rmsnorm_stats.reference(x, weight, eps)
    return *norm_from_statistics(x, mean, rstd, weight, bias, code, group_size), rstd


@norm_block_quantize.fake
def _(x, weight, bias, eps, centered, code, group_size):
    groups = (x.shape[1] + group_size - 1) // group_size
    return (
        *empty_rows(x, x.shape, E4M3.dtype),
        x.new_empty(x.shape, dtype=group_code(code).dtype),
        x.new_empty((x.shape[0], groups), dtype=torch.bfloat16),
        x.new_empty(x.shape[:1], dtype=torch.float32),
    )


@op
def add_norm_block_quantize(
    y: Tensor,
    residual: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    centered: bool,
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x = residual + y (T, H), and `norm_block_quantize` of x, still in one pass."""
    x = (residual + y).contiguous()
    return x, *norm_block_quantize.reference(x, weight, bias, eps, centered, code, group_size)


@add_norm_block_quantize.fake
def _(y, residual, weight, bias, eps, centered, code, group_size):
    groups = (y.shape[1] + group_size - 1) // group_size
    return (
        sum_like(y, residual),
        *empty_rows(y, y.shape, E4M3.dtype),
        y.new_empty(y.shape, dtype=group_code(code).dtype),
        y.new_empty((y.shape[0], groups), dtype=torch.bfloat16),
        y.new_empty(y.shape[:1], dtype=torch.float32),
    )


@triton.jit
def _row_sum(x):
    return tl.sum(tl.sum(tl.sum(x, 2), 1), 0)


@kernel
def _norm_kernel(
    x_ptr,  # (T, H)
    residual_ptr,  # (T, H), if ADD
    sum_ptr,  # (T, H): residual + x, which is then normalised, if ADD
    weight_ptr,  # (H,), if HAS_WEIGHT
    bias_ptr,  # (H,), if HAS_BIAS
    y_ptr,  # (T, H) E4M3
    scale_ptr,  # (ceil(H / 128), T) FP32
    codes_ptr,  # (T, H) 8-bit
    amax_ptr,  # (T, n) BF16
    rstd_ptr,  # (T,) FP32
    T,
    H,
    n,
    eps,
    INVERSE_MAX: tl.constexpr,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    G: tl.constexpr,
    CODE: tl.constexpr,
    NB: tl.constexpr,  # blocks of a row, rounded up to a power of 2
):
    row = tl.program_id(0).to(tl.int64)
    SUB: tl.constexpr = 128 // G
    block = tl.arange(0, NB)
    group = block[:, None] * SUB + tl.arange(0, SUB)[None, :]
    h = group[:, :, None] * G + tl.arange(0, G)[None, None, :]  # (NB, SUB, G)
    inside = h < H
    x = tl.load(x_ptr + row * H + h, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * H + h, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * H + h, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if CENTERED:
        x = tl.where(inside, x - _row_sum(x) / H, 0.0)
    rstd = tl.rsqrt(_row_sum(x * x) / H + eps)
    tl.store(rstd_ptr + row, rstd)
    xhat = x * rstd
    amax = max_magnitude(xhat, 2).to(tl.bfloat16)
    tl.store(amax_ptr + row * n + group, amax, mask=group < n)
    tl.store(codes_ptr + row * H + h, encode(xhat, amax.to(tl.float32)[:, :, None], CODE), mask=inside)
    y = xhat
    if HAS_WEIGHT:
        y = y * tl.load(weight_ptr + h, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + h, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(max_magnitude(max_magnitude(y, 2), 1), INVERSE_MAX)
    tl.store(scale_ptr + block.to(tl.int64) * T + row, scale, mask=block * 128 < H)
    y = y * reciprocal(scale)[:, None, None]
    tl.store(y_ptr + row * H + h, to_float8(y, tl.float8e4nv), mask=inside)


def _launch_norm(
    x: Tensor,
    added: Optional[tuple[Tensor, Tensor]],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    centered: bool,
    code: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`norm_block_quantize` of x (T, H); `added`: the residual, and where its sum with x goes."""
    weight, bias = dense(weight, bias)
    tokens, hidden = x.shape
    n, padded = cdiv(hidden, group_size), power_of_2(blocks(hidden))
    y, scale = empty_rows(x, x.shape, E4M3.dtype)
    codes = torch.empty(x.shape, dtype=group_code(code).dtype, device=x.device)
    group_amax = torch.empty((tokens, n), dtype=torch.bfloat16, device=x.device)
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    warps = min(max(padded * BLOCK // (32 * NORM_ELEMENTS), 4), 32)
    with on_device(x):
        _norm_kernel[(tokens,)](
            x, *((x, x) if added is None else added), x if weight is None else weight, x if bias is None else bias,
            y, scale, codes, group_amax, rstd, tokens, hidden, n, eps, inverse_max("e4m3"),
            added is not None, centered, weight is not None, bias is not None, group_size, CODES[code], padded,
            num_warps=warps, **EXACT,
        )  # fmt: skip
    return y, scale, codes, group_amax, rstd


@norm_block_quantize.cuda
def _(x, weight, bias, eps, centered, code, group_size):
    if BLOCK % group_size:
        return norm_block_quantize.reference(x, weight, bias, eps, centered, code, group_size)
    return _launch_norm(x.contiguous(), None, weight, bias, eps, centered, code, group_size)


@add_norm_block_quantize.cuda
def _(y, residual, weight, bias, eps, centered, code, group_size):
    if BLOCK % group_size or y.dtype != residual.dtype:
        return add_norm_block_quantize.reference(y, residual, weight, bias, eps, centered, code, group_size)
    y, residual = dense(y, residual)
    x = torch.empty_like(y)
    return x, *_launch_norm(y, (residual, x), weight, bias, eps, centered, code, group_size)
