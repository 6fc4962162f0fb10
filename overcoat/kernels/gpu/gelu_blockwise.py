"""Kernels of kernels/gelu_blockwise.py: gelu(u) and its gradient straight to FP8 blocks.

Bytes moved, with V = T * I * 2:

    gelu_block_quantize            1 V read, 1/2 V of codes and 1/2 V of h written
    gelu_block_backward            1 V + 1/2 V read, 1 V + 1/2 V written
    gelu_block_backward_quantize   1 V + 1/2 V read, twice; 1/2 V + 1/2 V + 1/2 V written: du in both layouts, h; and,
                                   with a bias, sums over 128 tokens, V / 64

Two kernels make the gradients, as SwiGLU's do (blockwise_backward.py): one for the blocks along rows, one for those
along tokens. Everything equals the reference bit for bit, except the sums over tokens, which add in another order.

Legend: that of blockwise.py; I intermediate width.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, FLOAT8, group_code
from overcoat.kernels.blockwise import blocks, empty_rows, empty_rows_t
from overcoat.kernels.gpu.block_tiles import (
    Strip,
    quad_magnitude,
    row_tile,
    store_rows,
    store_scales,
    store_values,
    strip_columns,
    token_blocks,
)
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    TRITON_FLOAT8,
    encode,
    inverse_max,
    max_magnitude,
    two_amax,
    two_amax_and_sum,
)
from overcoat.kernels.gpu.gelu import gelu, is_tanh
from overcoat.kernels.gpu.gelu_backward import gradient_of, gradient_quads, load_operands
from overcoat.kernels.gpu.launch import cdiv, dense, kernel, on_device, registers
from overcoat.kernels.gpu.partials import sum_partials
from overcoat.kernels.gpu.tiles import store_quads


@triton.jit
def _tile(BT: tl.constexpr, G: tl.constexpr):
    """Rows and columns of this program's tile of BT tokens and one block: t0, g0, t, g, c (NG, G) from g0 * G on."""
    NG: tl.constexpr = 128 // G
    g = tl.arange(0, NG)
    c = g[:, None] * G + tl.arange(0, G)[None, :]
    return tl.program_id(1) * BT, tl.program_id(0) * NG, tl.arange(0, BT), g, c


@kernel
def _forward_kernel(
    u_ptr,  # (T, I)
    h_ptr,  # (T, I) E4M3
    scale_ptr,  # (ceil(I / 128), T) FP32
    codes_ptr,  # (T, I) 8-bit
    amax_ptr,  # (T, n) BF16
    T,
    I,  # noqa: E741
    n,
    INVERSE_MAX: tl.constexpr,
    TANH: tl.constexpr,
    G: tl.constexpr,
    CODE: tl.constexpr,
    BT: tl.constexpr,
):
    t0, g0, t, g, c = _tile(BT, G)
    inside = (t < T - t0)[:, None, None] & (c < I - g0 * G)[None, :, :]
    known = (t < T - t0)[:, None] & (g < n - g0)[None, :]
    start = t0.to(tl.int64) * I + g0 * G
    offsets = t[:, None, None] * I + c[None, :, :]
    u = tl.load(u_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
    amax = max_magnitude(u, 2).to(tl.bfloat16)
    tl.store(amax_ptr + t0.to(tl.int64) * n + g0 + (t[:, None] * n + g[None, :]), amax, mask=known)
    tl.store(codes_ptr + start + offsets, encode(u, amax.to(tl.float32)[:, :, None], CODE), mask=inside)
    h, _ = gelu(u, TANH)
    scale_ptr += tl.program_id(0).to(tl.int64) * T + t0
    store_rows(h, t, T - t0, h_ptr + start, scale_ptr, offsets, inside, INVERSE_MAX)


def gelu_block_quantize(
    u: Tensor, approximate: str, code: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h in E4M3 (T, I) and its scale, codes (T, I) and maxima (T, n); group_size divides 128."""
    u = u.contiguous()
    tokens, width = u.shape
    n = cdiv(width, group_size)
    h, scale = empty_rows(u, u.shape, E4M3.dtype)
    codes = torch.empty(u.shape, dtype=group_code(code).dtype, device=u.device)
    group_amax = torch.empty((tokens, n), dtype=torch.bfloat16, device=u.device)
    rows = row_tile(tokens)
    with on_device(u):
        _forward_kernel[(blocks(width), cdiv(tokens, rows))](
            u, h, scale, codes, group_amax, tokens, width, n, inverse_max("e4m3"),
            is_tanh(approximate), group_size, CODES[code], rows, num_warps=4, **EXACT,
        )  # fmt: skip
    return h, scale, codes, group_amax


@kernel
def _gradient_rows_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, I) 8-bit
    amax_ptr,  # (T, n) BF16
    out_ptr,  # (T, I) FP8: du
    scale_ptr,  # (ceil(I / 128), T) FP32
    T,
    I,  # noqa: E741
    n,
    INVERSE_MAX: tl.constexpr,
    TANH: tl.constexpr,
    G: tl.constexpr,
    CODE: tl.constexpr,
    BT: tl.constexpr,
):
    t0, g0, t, g, c = _tile(BT, G)
    start = t0.to(tl.int64) * I + g0 * G
    dh_ptr += start
    codes_ptr += start
    amax_ptr += t0.to(tl.int64) * n + g0
    real = c < I - g0 * G
    operands = load_operands(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, T - t0, n - g0, I, n)
    du, _, inside = gradient_of(operands, operands, CODE, TANH)
    scale_ptr += tl.program_id(0).to(tl.int64) * T + t0
    offsets = t[:, None, None] * I + c[None, :, :]
    store_rows(du, t, T - t0, out_ptr + start, scale_ptr, offsets, inside, INVERSE_MAX)


@kernel
def _gradient_columns_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, I) 8-bit
    amax_ptr,  # (T, n) BF16
    out_ptr,  # (T, I): du, if VALUES
    out_t_ptr,  # (I, P / 4) int32: four of du's FP8 each, unless VALUES
    scale_t_ptr,  # (ceil(T / 128), I) FP32, unless VALUES
    h_t_ptr,  # (I, P / 4) int32: four E4M3 each
    h_scale_ptr,  # (ceil(T / 128), I) FP32
    partial_ptr,  # (ceil(T / 128), I) FP32: sums of du over a tile's tokens, if SUMS
    T,
    I,  # noqa: E741
    P,
    n,
    TYPE: tl.constexpr,
    INVERSE_MAX: tl.constexpr,
    H_INVERSE_MAX: tl.constexpr,
    VALUES: tl.constexpr,
    SUMS: tl.constexpr,
    TANH: tl.constexpr,
    G: tl.constexpr,
    CODE: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    PADDED: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    t0, t = block * 128, 4 * tl.arange(0, 32)
    c0, c, g, real = strip_columns(tile, I, G, G, W, V)
    first = t0.to(tl.int64) * I + c0
    dh_ptr += first
    codes_ptr += first
    amax_ptr += t0.to(tl.int64) * n
    d, h, inside = gradient_quads(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, T - t0, n, I, n, CODE, TANH)
    column, quad, quads, stride_t = c0.to(tl.int64), tl.arange(0, 32), (P - t0) // 4, P // 4
    turn, place = block.to(tl.int64) * I + column, column * stride_t + t0 // 4
    h_scale_ptr += turn
    if VALUES:
        tl.static_assert(not SUMS)
        h_inverse = store_scales(max_magnitude(quad_magnitude(*h), 0), h_scale_ptr, c, real, H_INVERSE_MAX)
        store_values(d, inside, out_ptr + first + (t[:, None, None] * I + c[None, :, :]), I)
    else:
        if SUMS:
            total = (d[0] + d[1]) + (d[2] + d[3])
            h_amax, d_amax, total = two_amax_and_sum(quad_magnitude(*h), quad_magnitude(*d), total, 0)
            tl.store(partial_ptr + turn + c, total, mask=real)
        else:
            h_amax, d_amax = two_amax(quad_magnitude(*h), quad_magnitude(*d), 0)
        h_inverse = store_scales(h_amax, h_scale_ptr, c, real, H_INVERSE_MAX)
        d_inverse = store_scales(d_amax, scale_t_ptr + turn, c, real, INVERSE_MAX)
        store_quads(d, inside, d_inverse, out_t_ptr + place, c, quad, real, quads, stride_t, PADDED, TYPE)
    store_quads(h, inside, h_inverse, h_t_ptr + place, c, quad, real, quads, stride_t, PADDED, tl.float8e4nv)


# By measurement (docs/log-kernels.md): with du in FP8, and as it is.
GRADIENT_STRIP, VALUES_STRIP = Strip(32, 4, 4, 80), Strip(32, 8, 4, 128)


def _launch_columns(
    dh: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    gradient: tuple[Tensor, ...],
    fmt: Optional[str],
    has_bias: bool,
    approximate: str,
    code: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill `gradient`: (T, I), or with `fmt` its transposed operand and scale.

    Returns h as transposed operand, its scale, and each 128 tokens' sums (ceil(T / 128), I), (0, I) without a bias.
    """
    tokens, width = dh.shape
    h_t, h_scale = empty_rows_t(dh, dh.shape, E4M3.dtype)
    out, out_t, scale_t = (h_t, *gradient) if fmt else (*gradient, h_t, h_scale)
    padded, strip = h_t.shape[1], GRADIENT_STRIP if fmt else VALUES_STRIP
    partial = torch.empty((blocks(tokens) if has_bias else 0, width), dtype=torch.float32, device=dh.device)
    with on_device(dh):
        _gradient_columns_kernel[(cdiv(width, strip.columns), token_blocks(padded))](
            dh, codes, group_amax, out, out_t.view(torch.int32), scale_t, h_t.view(torch.int32), h_scale,
            partial if has_bias else h_scale, tokens, width, padded, group_amax.shape[1],
            TRITON_FLOAT8[fmt or "e4m3"], inverse_max(fmt or "e4m3"), inverse_max("e4m3"), fmt is None, has_bias,
            is_tanh(approximate), group_size, CODES[code], strip.columns, strip.vector, padded > tokens,
            num_warps=strip.warps, maxnreg=registers(strip.registers, dh, group_size), **EXACT,
        )  # fmt: skip
    return h_t, h_scale, partial


def gelu_block_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, approximate: str, code: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """du (T, I) in dh's dtype; h as transposed E4M3 operand; group_size divides 128."""
    dh, codes, group_amax = dense(dh, codes, group_amax)
    out = torch.empty_like(dh)
    return out, *_launch_columns(dh, codes, group_amax, (out,), None, False, approximate, code, group_size)[:2]


def gelu_block_backward_quantize(
    dh: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    fmt: str,
    has_bias: bool,
    approximate: str,
    code: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """du in FP8 in both layouts, h as transposed operand, du's sum over tokens (I,) or (0,) FP32."""
    dh, codes, group_amax = dense(dh, codes, group_amax)
    tokens, width = dh.shape
    out, scale = empty_rows(dh, dh.shape, FLOAT8[fmt].dtype)
    gradient_t = empty_rows_t(dh, dh.shape, FLOAT8[fmt].dtype)
    rows = row_tile(tokens)
    with on_device(dh):
        _gradient_rows_kernel[(blocks(width), cdiv(tokens, rows))](
            dh, codes, group_amax, out, scale, tokens, width, group_amax.shape[1],
            inverse_max(fmt), is_tanh(approximate), group_size, CODES[code], rows, num_warps=4, **EXACT,
        )  # fmt: skip
    h_t, h_scale, partial = _launch_columns(
        dh, codes, group_amax, gradient_t, fmt, has_bias, approximate, code, group_size
    )
    return out, scale, *gradient_t, h_t, h_scale, sum_partials(partial)[0] if has_bias else partial.view(0)
