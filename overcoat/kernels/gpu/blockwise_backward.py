"""Kernels of the backward in kernels/blockwise_fused.py: gradients of gate and up, q, k and v straight to FP8 blocks.

Bytes moved, with V = T * I * 2, Q = T * (num_q + 2 num_kv) * D * 2:

    swiglu_block_backward            1 V + 1 V read, 2 V + 1/2 V written
    swiglu_block_backward_quantize   1 V + 1 V read, twice; 1 V + 1 V + 1/2 V written: the gradient in both layouts, h
    qk_rope_block_backward           1 Q read, 1/2 Q + 1/2 Q written

SwiGLU's gradients take two kernels, one for the blocks along rows and one for those along tokens: bound by
instructions more than by memory, they cost no more than one kernel that would hold 128 x 128 values of three results.
Everything equals the reference bit for bit.

Legend: that of blockwise.py; I intermediate width, D head width.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, FLOAT8
from overcoat.kernels.blockwise import BLOCK, blocks, empty_rows, empty_rows_t
from overcoat.kernels.gpu.blockwise import (
    ROW_TILE,
    SQUARE_WARPS,
    row_amax,
    store_columns,
    store_rows,
    store_scaled_rows,
)
from overcoat.kernels.gpu.common import CODES, EXACT, inverse_max, larger, scale_of
from overcoat.kernels.gpu.launch import cdiv, dense_rows, kernel, on_device
from overcoat.kernels.gpu.swiglu_backward import gradient_rows

# ---- SwiGLU, backward -----------------------------------------------------------------------------------------------


@kernel
def _gradient_columns_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, 2I) 8-bit
    amax_ptr,  # (T, 2, n) BF16
    out_ptr,  # (T, 2I): gradient of gate and up, if VALUES
    out_t_ptr,  # (2I, P / 2) int16: pairs of the gradient's FP8, unless VALUES
    scale_t_ptr,  # (ceil(T / 128), 2I) FP32, unless VALUES
    h_t_ptr,  # (I, P / 2) int16: pairs of E4M3
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
):
    NG: tl.constexpr = (W + G - 1) // G
    WG: tl.constexpr = W // NG
    t0, c0 = tl.program_id(0) * 128, tl.program_id(1) * W
    t, start = 2 * tl.arange(0, 64), tl.arange(0, NG) * WG
    c = start[:, None] + tl.arange(0, WG)[None, :]  # (NG, WG), from column c0 on
    g, real = (c0 + start) // G, c < I - c0
    dh_ptr += t0.to(tl.int64) * I + c0
    codes_ptr += t0.to(tl.int64) * 2 * I + c0
    amax_ptr += t0.to(tl.int64) * 2 * n
    a0, b0, h0, in0 = gradient_rows(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, T - t0, n, I, n, CODE)
    a1, b1, h1, in1 = gradient_rows(dh_ptr, codes_ptr, amax_ptr, t + 1, c, g, real, T - t0, n, I, n, CODE)
    column, turn, pairs, half = c0.to(tl.int64), tl.program_id(0).to(tl.int64), (P - t0) // 2, P // 2
    h_t_ptr += column * half + t0 // 2
    h_scale_ptr += turn * I + column
    store_columns(h0, h1, in0, in1, h_t_ptr, h_scale_ptr, c, real, pairs, half, H_INVERSE_MAX, tl.float8e4nv)
    if VALUES:
        target = out_ptr + (t0.to(tl.int64) * 2 * I + c0) + (t[:, None, None] * (2 * I) + c[None, :, :])
        tl.store(target, a0.to(out_ptr.dtype.element_ty), mask=in0)
        tl.store(target + I, b0.to(out_ptr.dtype.element_ty), mask=in0)
        tl.store(target + 2 * I, a1.to(out_ptr.dtype.element_ty), mask=in1)
        tl.store(target + 3 * I, b1.to(out_ptr.dtype.element_ty), mask=in1)
    else:
        out_t_ptr += column * half + t0 // 2
        scale_t_ptr += turn * 2 * I + column
        store_columns(a0, a1, in0, in1, out_t_ptr, scale_t_ptr, c, real, pairs, half, INVERSE_MAX, TYPE)
        out_t_ptr += tl.cast(I, tl.int64) * half
        store_columns(b0, b1, in0, in1, out_t_ptr, scale_t_ptr + I, c, real, pairs, half, INVERSE_MAX, TYPE)


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
    NG: tl.constexpr = 128 // G
    t0, g0 = tl.program_id(1) * BT, tl.program_id(0) * NG
    t, g = tl.arange(0, BT), tl.arange(0, NG)
    c = g[:, None] * G + tl.arange(0, G)[None, :]  # (NG, G), from column g0 * G on
    start = t0.to(tl.int64) * 2 * I + g0 * G
    dh_ptr += t0.to(tl.int64) * I + g0 * G
    amax_ptr += t0.to(tl.int64) * 2 * n + g0
    a, b, _, inside = gradient_rows(
        dh_ptr, codes_ptr + start, amax_ptr, t, c, g, c < I - g0 * G, T - t0, n - g0, I, n, CODE
    )
    offsets = t[:, None, None] * (2 * I) + c[None, :, :]
    scale_ptr += tl.program_id(0).to(tl.int64) * T + t0
    store_rows(a, t, T - t0, out_ptr + start, scale_ptr, offsets, inside, INVERSE_MAX)
    scale_ptr += tl.cast(I // 128, tl.int64) * T
    store_rows(b, t, T - t0, out_ptr + start + I, scale_ptr, offsets, inside, INVERSE_MAX)


# Columns of a tile of 128 tokens: three results of 128 x 128 would need more registers than there are.
STRIP, STRIP_WARPS = 32, 8
TRITON_FLOAT8 = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


def _launch_columns(
    dh: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    gradient: tuple[Tensor, ...],
    fmt: Optional[str],
    code: str,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    """Fill `gradient`: (T, 2I), or with `fmt` its transposed operand and scale. Returns h as transposed operand."""
    tokens, width = dh.shape
    h_t, h_scale = empty_rows_t(dh, dh.shape, E4M3.dtype)
    out, out_t, scale_t = (h_t, *gradient) if fmt else (*gradient, h_t, h_scale)
    padded = h_t.shape[1]
    with on_device(dh):
        _gradient_columns_kernel[(blocks(padded), cdiv(width, STRIP))](
            dh, codes, group_amax, out, out_t.view(torch.int16), scale_t, h_t.view(torch.int16), h_scale,
            tokens, width, padded, group_amax.shape[2], TRITON_FLOAT8[fmt or "e4m3"], inverse_max(fmt or "e4m3"),
            inverse_max("e4m3"), fmt is None, group_size, CODES[code], STRIP, num_warps=STRIP_WARPS, **EXACT,
        )  # fmt: skip
    return h_t, h_scale


def swiglu_block_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, code: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of gate_up (T, 2I) in dh's dtype; h as transposed E4M3 operand; group_size divides 128."""
    out = torch.empty_like(codes, dtype=dh.dtype)
    return out, *_launch_columns(dh.contiguous(), codes, group_amax, (out,), None, code, group_size)


def swiglu_block_backward_quantize(
    dh: Tensor, codes: Tensor, group_amax: Tensor, fmt: str, code: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradient of gate_up in FP8 in both layouts, and h as transposed operand; I is a multiple of 128."""
    dh = dh.contiguous()
    tokens, width = dh.shape
    out, scale = empty_rows(dh, codes.shape, FLOAT8[fmt].dtype)
    gradient_t = empty_rows_t(dh, codes.shape, FLOAT8[fmt].dtype)
    with on_device(dh):
        _gradient_rows_kernel[(blocks(width), cdiv(tokens, ROW_TILE))](
            dh, codes, group_amax, out, scale, tokens, width, group_amax.shape[2],
            inverse_max(fmt), group_size, CODES[code], ROW_TILE, num_warps=4, **EXACT,
        )  # fmt: skip
    h = _launch_columns(dh, codes, group_amax, gradient_t, fmt, code, group_size)
    return out, scale, *gradient_t, *h


# ---- rotary embedding -----------------------------------------------------------------------------------------------


@triton.jit
def _rotated_back(dy_ptr, cos_ptr, sin_ptr, offsets, place, inside, E, ROTATE: tl.constexpr):
    """The halves (64, heads, E) of some heads' gradient before the rotation; `place`: of each row in cos and sin."""
    x1 = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(dy_ptr + offsets + E, mask=inside, other=0.0).to(tl.float32)
    if ROTATE:
        cos1 = tl.load(cos_ptr + place, mask=inside, other=0.0).to(tl.float32)
        cos2 = tl.load(cos_ptr + place + E, mask=inside, other=0.0).to(tl.float32)
        sin1 = tl.load(sin_ptr + place, mask=inside, other=0.0).to(tl.float32)
        sin2 = tl.load(sin_ptr + place + E, mask=inside, other=0.0).to(tl.float32)
        x1, x2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    return x1, x2


@triton.jit
def _store_halves(x1, x2, t, rows, out_ptr, scale_ptr, offsets, E, inside, INVERSE_MAX: tl.constexpr):
    """Rows t of a block given as the halves of its heads."""
    scale = scale_of(row_amax(larger(tl.abs(x1), tl.abs(x2))), INVERSE_MAX)
    store_scaled_rows(x1, scale, t, rows, out_ptr, scale_ptr, offsets, inside)
    store_scaled_rows(x2, scale, t, rows, out_ptr, scale_ptr, offsets + E, inside)


@kernel
def _rope_kernel(
    dy_ptr,  # (T, columns), row stride `stride_dy`: gradient of the rotated q or k, or of v
    cos_ptr,  # (positions, D)
    sin_ptr,  # (positions, D)
    out_ptr,  # (T, columns) FP8, row stride C: the part's columns of the fused buffer
    scale_ptr,  # (columns / 128, T) FP32
    out_t_ptr,  # (columns, P / 2) int16, pairs of FP8: the part's rows of the transposed buffer
    scale_t_ptr,  # (ceil(T / 128), columns) FP32, row stride C
    T,
    P,
    positions,
    C,
    stride_dy,
    INVERSE_MAX: tl.constexpr,
    D: tl.constexpr,
    ROTATE: tl.constexpr,
):
    E: tl.constexpr = D // 2
    t0, c0 = tl.program_id(0) * 128, tl.program_id(1) * 128
    t, e = 2 * tl.arange(0, 64), tl.arange(0, E)
    c = (tl.arange(0, 128 // D) * D)[:, None] + e[None, :]  # (heads of a block, E): the heads' first halves
    real = c < 128
    in0, in1 = (t < T - t0)[:, None, None] & real[None, :, :], (t + 1 < T - t0)[:, None, None] & real[None, :, :]
    dy_ptr += t0.to(tl.int64) * stride_dy + c0
    source, angle = t[:, None, None] * stride_dy + c[None, :, :], e[None, None, :]
    place0 = ((t0 + t) % positions)[:, None, None] * D + angle
    place1 = ((t0 + t + 1) % positions)[:, None, None] * D + angle
    a1, a2 = _rotated_back(dy_ptr, cos_ptr, sin_ptr, source, place0, in0, E, ROTATE)
    b1, b2 = _rotated_back(dy_ptr + stride_dy, cos_ptr, sin_ptr, source, place1, in1, E, ROTATE)
    out_ptr += t0.to(tl.int64) * C + c0
    scale_ptr += tl.program_id(1).to(tl.int64) * T + t0
    target = t[:, None, None] * C + c[None, :, :]
    _store_halves(a1, a2, t, T - t0, out_ptr, scale_ptr, target, E, in0, INVERSE_MAX)
    _store_halves(b1, b2, t + 1, T - t0, out_ptr + C, scale_ptr, target, E, in1, INVERSE_MAX)
    out_t_ptr += c0.to(tl.int64) * (P // 2) + t0 // 2
    scale_t_ptr += tl.program_id(0).to(tl.int64) * C + c0
    pairs, half = (P - t0) // 2, P // 2
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    store_columns(a1, b1, in0, in1, out_t_ptr, scale_t_ptr, c, real, pairs, half, INVERSE_MAX, TYPE)
    store_columns(a2, b2, in0, in1, out_t_ptr + E * half, scale_t_ptr + E, c, real, pairs, half, INVERSE_MAX, TYPE)


def qk_rope_block_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, fmt: str, num_q: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of the fused buffer in FP8 in both layouts; D divides 128, and 128 each part's columns."""
    tokens, columns, width = dq.shape[0], dq.shape[1] + dk.shape[1] + dv.shape[1], dq.shape[1] // num_q
    out, scale = empty_rows(dq, (tokens, columns), FLOAT8[fmt].dtype)
    out_t, scale_t = empty_rows_t(dq, (tokens, columns), FLOAT8[fmt].dtype)
    words, padded = out_t.view(torch.int16), out_t.shape[1]
    cos, sin, first = cos.contiguous(), sin.contiguous(), 0
    with on_device(dq):
        for part, rotate in zip(map(dense_rows, (dq, dk, dv)), (True, True, False), strict=True):
            last = first + part.shape[1]
            _rope_kernel[(blocks(padded), part.shape[1] // BLOCK)](
                part, cos, sin, out[:, first:last], scale[first // BLOCK :], words[first:last], scale_t[:, first:],
                tokens, padded, cos.shape[0], columns, part.stride(0),
                inverse_max(fmt), width, rotate, num_warps=SQUARE_WARPS, **EXACT,
            )  # fmt: skip
            first = last
    return out, scale, out_t, scale_t
