"""Kernels of the forward in kernels/blockwise_fused.py: norm and SwiGLU straight to FP8 blocks.

Bytes moved, with U = T * H * 2, V = T * I * 2:

    norm_block_quantize     1 U read, 1/2 U of y and 1/2 U of codes written; with a sum 1 U more of each
    swiglu_block_quantize   2 V read, 1 V of codes and 1/2 V of h written

The norm's sums over a row are taken in another order than PyTorch's, so rstd may differ in its last bits; given rstd
(and the mean), all else equals the reference bit for bit, as does SwiGLU.

Legend: that of blockwise.py; H hidden, I intermediate width.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, group_code
from overcoat.kernels.blockwise import BLOCK, blocks, empty_rows
from overcoat.kernels.gpu.block_tiles import row_tile, store_rows
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    encode,
    inverse_max,
    max_magnitude,
    power_of_2,
    scale_of,
    sigmoid,
    to_float8,
)
from overcoat.kernels.gpu.hardware import reciprocal
from overcoat.kernels.gpu.launch import cdiv, dense, kernel, on_device

# Elements of a row that one thread of the norm holds.
NORM_ELEMENTS = 16


# ---- norm -----------------------------------------------------------------------------------------------------------


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


def norm_block_quantize(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    centered: bool,
    code: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y in E4M3 and its scale, codes of xhat and their maxima, rstd; group_size divides 128."""
    return _launch_norm(x.contiguous(), None, weight, bias, eps, centered, code, group_size)


def add_norm_block_quantize(
    y: Tensor,
    residual: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    centered: bool,
    code: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x = residual + y (T, H), and `norm_block_quantize` of it."""
    y, residual = dense(y, residual)
    x = torch.empty_like(y)
    return x, *_launch_norm(y, (residual, x), weight, bias, eps, centered, code, group_size)


# ---- SwiGLU, forward ------------------------------------------------------------------------------------------------


@triton.jit
def _encode_half(values_ptr, codes_ptr, amax_ptr, offsets, inside, places, known, CODE: tl.constexpr):
    """Load (BT, NG, G) values of gate or up, write their codes and maxima, and return them in FP32."""
    x = tl.load(values_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    amax = max_magnitude(x, 2).to(tl.bfloat16)
    tl.store(amax_ptr + places, amax, mask=known)
    tl.store(codes_ptr + offsets, encode(x, amax.to(tl.float32)[:, :, None], CODE), mask=inside)
    return x


@kernel
def _swiglu_kernel(
    gate_up_ptr,  # (T, 2I)
    h_ptr,  # (T, I) E4M3
    scale_ptr,  # (ceil(I / 128), T) FP32
    codes_ptr,  # (T, 2I) 8-bit
    amax_ptr,  # (T, 2, n) BF16
    T,
    I,  # noqa: E741
    n,
    INVERSE_MAX: tl.constexpr,
    G: tl.constexpr,
    CODE: tl.constexpr,
    BT: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    NG: tl.constexpr = 128 // G
    t0, g0 = block * BT, tile * NG
    t, g = tl.arange(0, BT), tl.arange(0, NG)
    c = g[:, None] * G + tl.arange(0, G)[None, :]  # (NG, G), from column g0 * G on
    inside = (t < T - t0)[:, None, None] & (c < I - g0 * G)[None, :, :]
    known = (t < T - t0)[:, None] & (g < n - g0)[None, :]
    start = t0.to(tl.int64) * 2 * I + g0 * G
    gate_up_ptr += start
    codes_ptr += start
    amax_ptr += t0.to(tl.int64) * 2 * n + g0
    offsets, places = t[:, None, None] * (2 * I) + c[None, :, :], t[:, None] * (2 * n) + g[None, :]
    gate = _encode_half(gate_up_ptr, codes_ptr, amax_ptr, offsets, inside, places, known, CODE)
    up = _encode_half(gate_up_ptr + I, codes_ptr + I, amax_ptr + n, offsets, inside, places, known, CODE)
    h_ptr += t0.to(tl.int64) * I + g0 * G
    scale_ptr += tile.to(tl.int64) * T + t0
    offsets = t[:, None, None] * I + c[None, :, :]
    store_rows(gate * sigmoid(gate) * up, t, T - t0, h_ptr, scale_ptr, offsets, inside, INVERSE_MAX)


def swiglu_block_quantize(gate_up: Tensor, code: str, group_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h in E4M3 (T, I) and its scale, codes (T, 2I) and maxima (T, 2, n); group_size divides 128."""
    gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    n = cdiv(width, group_size)
    h, scale = empty_rows(gate_up, (tokens, width), E4M3.dtype)
    codes = torch.empty(gate_up.shape, dtype=group_code(code).dtype, device=gate_up.device)
    group_amax = torch.empty((tokens, 2, n), dtype=torch.bfloat16, device=gate_up.device)
    rows = row_tile(tokens)
    with on_device(gate_up):
        _swiglu_kernel[(blocks(width), cdiv(tokens, rows))](
            gate_up, h, scale, codes, group_amax, tokens, width, n,
            inverse_max("e4m3"), group_size, CODES[code], rows, num_warps=4, **EXACT,
        )  # fmt: skip
    return h, scale, codes, group_amax
