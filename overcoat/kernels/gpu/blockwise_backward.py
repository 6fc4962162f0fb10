"""Kernels of the backward in kernels/blockwise_fused.py: gradients of gate and up straight to FP8 blocks.

Bytes moved, with V = T * I * 2:

    swiglu_block_backward            1 V + 1 V read, 2 V + 1/2 V written
    swiglu_block_backward_quantize   1 V + 1 V read, twice; 1 V + 1 V + 1/2 V written: the gradient in both layouts, h

SwiGLU's gradients take two kernels, one for the blocks along rows and one for those along tokens: 128 x 128 values of
three results are more than the registers of a program, and one kernel that finds the maxima first and computes
everything again took 459 us instead of 388.
Everything equals the reference bit for bit.

Legend: that of blockwise.py; I intermediate width.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, FLOAT8
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
    inverse_max,
    max_magnitude,
    three_amax,
)
from overcoat.kernels.gpu.launch import cdiv, dense, kernel, on_device, registers
from overcoat.kernels.gpu.swiglu_backward import gradient_of, gradient_quads, load_operands
from overcoat.kernels.gpu.tiles import store_quads

# ---- SwiGLU, backward -----------------------------------------------------------------------------------------------


@kernel
def _gradient_rows_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, 2I) 8-bit
    amax_ptr,  # (T, 2, n) BF16
    out_ptr,  # (T, 2I) FP8: gradient of gate and up
    scale_ptr,  # (2I / 128, T) FP32
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
    start = t0.to(tl.int64) * 2 * I + g0 * G
    dh_ptr += t0.to(tl.int64) * I + g0 * G
    amax_ptr += t0.to(tl.int64) * 2 * n + g0
    operands = load_operands(dh_ptr, codes_ptr + start, amax_ptr, t, c, g, c < I - g0 * G, T - t0, n - g0, I, n)
    a, b, _, inside = gradient_of(operands, operands, CODE)
    offsets = t[:, None, None] * (2 * I) + c[None, :, :]
    scale_ptr += tile.to(tl.int64) * T + t0
    store_rows(a, t, T - t0, out_ptr + start, scale_ptr, offsets, inside, INVERSE_MAX)
    scale_ptr += tl.cast(I // 128, tl.int64) * T
    store_rows(b, t, T - t0, out_ptr + start + I, scale_ptr, offsets, inside, INVERSE_MAX)


@kernel
def _gradient_columns_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, 2I) 8-bit
    amax_ptr,  # (T, 2, n) BF16
    out_ptr,  # (T, 2I): gradient of gate and up, if VALUES
    out_t_ptr,  # (2I, P / 4) int32: four of the gradient's FP8 each, unless VALUES
    scale_t_ptr,  # (ceil(T / 128), 2I) FP32, unless VALUES
    h_t_ptr,  # (I, P / 4) int32: four E4M3 each
    h_scale_ptr,  # (ceil(T / 128), I) FP32
    T,
    I,  # noqa: E741
    P,
    n,
    TYPE: tl.constexpr,
    INVERSE_MAX: tl.constexpr,
    H_INVERSE_MAX: tl.constexpr,
    VALUES: tl.constexpr,
    G: tl.constexpr,
    CODE: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    PADDED: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    t0, t = block * 128, 4 * tl.arange(0, 32)
    c0, c, g, real = strip_columns(tile, I, G, G, W, V)
    dh_ptr += t0.to(tl.int64) * I + c0
    codes_ptr += t0.to(tl.int64) * 2 * I + c0
    amax_ptr += t0.to(tl.int64) * 2 * n
    a, b, h, inside = gradient_quads(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, T - t0, n, I, n, CODE)
    column, turn, quad, quads, stride_t = (
        c0.to(tl.int64),
        block.to(tl.int64),
        tl.arange(0, 32),
        (P - t0) // 4,
        P // 4,
    )
    place = column * stride_t + t0 // 4
    h_scale_ptr += turn * I + column
    if VALUES:
        h_inverse = store_scales(max_magnitude(quad_magnitude(*h), 0), h_scale_ptr, c, real, H_INVERSE_MAX)
        target = out_ptr + (t0.to(tl.int64) * 2 * I + c0) + (t[:, None, None] * (2 * I) + c[None, :, :])
        store_values(a, inside, target, 2 * I)
        store_values(b, inside, target + I, 2 * I)
    else:
        a_amax, b_amax, h_amax = three_amax(quad_magnitude(*a), quad_magnitude(*b), quad_magnitude(*h), 0)
        h_inverse = store_scales(h_amax, h_scale_ptr, c, real, H_INVERSE_MAX)
        scale_t_ptr += turn * 2 * I + column
        a_inverse = store_scales(a_amax, scale_t_ptr, c, real, INVERSE_MAX)
        b_inverse = store_scales(b_amax, scale_t_ptr + I, c, real, INVERSE_MAX)
        out_t_ptr += place
        store_quads(a, inside, a_inverse, out_t_ptr, c, quad, real, quads, stride_t, PADDED, TYPE)
        out_t_ptr += tl.cast(I, tl.int64) * stride_t
        store_quads(b, inside, b_inverse, out_t_ptr, c, quad, real, quads, stride_t, PADDED, TYPE)
    store_quads(h, inside, h_inverse, h_t_ptr + place, c, quad, real, quads, stride_t, PADDED, tl.float8e4nv)


# By measurement (docs/log-kernels.md): with the gradient in FP8, and as it is.
GRADIENT_STRIP, VALUES_STRIP = Strip(32, 4, 4, 128), Strip(32, 4, 8, 80)


def _launch_gradient(
    dh: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    gradient: tuple[Tensor, ...],
    fmt: Optional[str],
    code: str,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    """Fill `gradient`: (T, 2I), or with `fmt` both operands and their scales. Returns h as transposed operand."""
    tokens, width = dh.shape
    h_t, h_scale = empty_rows_t(dh, dh.shape, E4M3.dtype)
    out, scale, out_t, scale_t = gradient if fmt else (*gradient, h_scale, h_t, h_scale)
    n, padded, strip = group_amax.shape[2], h_t.shape[1], GRADIENT_STRIP if fmt else VALUES_STRIP
    rows = row_tile(tokens)
    with on_device(dh):
        if fmt:
            _gradient_rows_kernel[(blocks(width), cdiv(tokens, rows))](
                dh, codes, group_amax, out, scale, tokens, width, n,
                inverse_max(fmt), group_size, CODES[code], rows, num_warps=4, **EXACT,
            )  # fmt: skip
        _gradient_columns_kernel[(cdiv(width, strip.columns), token_blocks(padded))](
            dh, codes, group_amax, out, out_t.view(torch.int32), scale_t, h_t.view(torch.int32), h_scale,
            tokens, width, padded, n, TRITON_FLOAT8[fmt or "e4m3"], inverse_max(fmt or "e4m3"), inverse_max("e4m3"),
            fmt is None, group_size, CODES[code], strip.columns, strip.vector, padded > tokens,
            num_warps=strip.warps, maxnreg=registers(strip.registers, dh, group_size), **EXACT,
        )  # fmt: skip
    return h_t, h_scale


def swiglu_block_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, code: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of gate_up (T, 2I) in dh's dtype; h as transposed E4M3 operand; group_size divides 128."""
    dh, codes, group_amax = dense(dh, codes, group_amax)
    out = torch.empty_like(codes, dtype=dh.dtype)
    return out, *_launch_gradient(dh, codes, group_amax, (out,), None, code, group_size)


def swiglu_block_backward_quantize(
    dh: Tensor, codes: Tensor, group_amax: Tensor, fmt: str, code: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradient of gate_up in FP8 in both layouts, and h as transposed operand; I is a multiple of 128."""
    dh, codes, group_amax = dense(dh, codes, group_amax)
    dtype = FLOAT8[fmt].dtype
    gradient = *empty_rows(dh, codes.shape, dtype), *empty_rows_t(dh, codes.shape, dtype)
    h = _launch_gradient(dh, codes, group_amax, gradient, fmt, code, group_size)
    return *gradient, *h
