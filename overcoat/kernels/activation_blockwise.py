"""activation_backward.py with block scales (`Recipe.linear_scaling="block"`): no pass for a bound.

Two kernels make dz in FP8, one for the blocks along rows and one for those along tokens, which also rebuilds h: the
registers of a program do not hold 128 x 128 values of three results. With V = T * I * 2 and F = 2 if gated, else 1:

    dz in 16 bits    V + F V / 2 read, F V + V / 2 written
    dz in FP8        V + F V / 2 read, twice; F V + V / 2 written

and, for a bias, sums over 128 tokens, F V / 64. Kernels equal their references bit for bit, but for these sums.

Layouts of operands: blockwise.py. Legend: activation_backward.py.
"""

from __future__ import annotations

from typing import List, Optional

import torch
from torch import Tensor

from overcoat.formats import E4M3, FLOAT8
from overcoat.kernels.activation_backward import (
    gradient,
    gradient_of,
    gradient_quads,
    load_operands,
    quad_sum,
    token_sums,
)
from overcoat.kernels.activation_functions import activation_of
from overcoat.kernels.block_tiles import (
    Strip,
    quad_magnitude,
    row_tile,
    store_rows,
    store_scales,
    store_values,
    strip_columns,
    token_blocks,
)
from overcoat.kernels.blockwise import BLOCK, blocks, empty_rows, empty_rows_t, row_blocks, row_blocks_t
from overcoat.kernels.codes import CODES
from overcoat.kernels.device import (
    EXACT,
    TRITON_FLOAT8,
    inverse_max,
    max_magnitude,
    three_amax,
    two_amax,
    two_amax_and_sum,
)
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, dense, kernel, registers
from overcoat.kernels.op import op
from overcoat.kernels.partials import sum_partials
from overcoat.kernels.tiles import store_quads


@op
def activation_block_backward(
    dh: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    fmt: Optional[str],
    has_bias: bool,
    activation: str,
    code: str,
    group_size: int,
) -> List[Tensor]:
    """dz, in FP8 in both layouts or in 16 bits, and h.

    Args:
        dh: (T, I), gradient of h; codes, group_amax: as kept.
        fmt: "e4m3" or "e5m2", has_bias: whether z's projection has a bias; None and False for 16 bits.

    Returns:
        In 16 bits: dz (T, F I) in dh's dtype; h as transposed E4M3 operand (I, P) and its scale (ceil(T / 128), I). In
        FP8: dz (T, F I) and its scale (ceil(F I / 128), T); dz transposed (F I, P) and its scale (ceil(T / 128), F I);
        h and its scale; sum of dz over the tokens (F I,) FP32, empty without a bias.
    """
    dz, h = gradient(dh, codes, group_amax, activation, code, group_size)
    if fmt is None:
        return [dz.to(dh.dtype), *row_blocks_t(h, E4M3)]
    both = *row_blocks(dz, FLOAT8[fmt]), *row_blocks_t(dz, FLOAT8[fmt])
    return [*both, *row_blocks_t(h, E4M3), token_sums(dz, has_bias)]


@kernel
def _activation_rows_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, F I) 8-bit
    amax_ptr,  # (T, F, n) BF16
    out_ptr,  # (T, F I) FP8: dz
    scale_ptr,  # (ceil(F I / 128), T) FP32
    T,
    I,  # noqa: E741
    n,
    INVERSE_MAX: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    G: tl.constexpr,
    CODE: tl.constexpr,
    BT: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    NG: tl.constexpr = 128 // G
    F: tl.constexpr = 2 if GATED else 1
    t0, g0, t, g = block * BT, tile * NG, tl.arange(0, BT), tl.arange(0, NG)
    c = g[:, None] * G + tl.arange(0, G)[None, :]  # (NG, G), from column g0 * G on
    start, real, rows = t0.to(tl.int64) * F * I + g0 * G, c < I - g0 * G, T - t0
    dh_ptr += t0.to(tl.int64) * I + g0 * G
    amax_ptr += t0.to(tl.int64) * F * n + g0
    operands = load_operands(dh_ptr, codes_ptr + start, amax_ptr, t, c, g, real, rows, n - g0, I, n, GATED)
    a, b, _, inside = gradient_of(operands, operands, FUNCTION, GATED, CODE)
    offsets = t[:, None, None] * (F * I) + c[None, :, :]
    scale_ptr += tile.to(tl.int64) * T + t0
    out_ptr += start
    store_rows(a, t, rows, out_ptr, scale_ptr, offsets, inside, INVERSE_MAX)
    if GATED:
        scale_ptr += tl.cast(I // 128, tl.int64) * T
        store_rows(b, t, rows, out_ptr + I, scale_ptr, offsets, inside, INVERSE_MAX)


@kernel
def _activation_columns_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, F I) 8-bit
    amax_ptr,  # (T, F, n) BF16
    out_ptr,  # (T, F I): dz, if VALUES
    out_t_ptr,  # (F I, P / 4) int32: four of dz's FP8 each, unless VALUES
    scale_t_ptr,  # (ceil(T / 128), F I) FP32, unless VALUES
    h_t_ptr,  # (I, P / 4) int32: four E4M3 each
    h_scale_ptr,  # (ceil(T / 128), I) FP32
    partial_ptr,  # (ceil(T / 128), F I) FP32: sums of dz over a tile's tokens, if SUMS
    T,
    I,  # noqa: E741
    P,
    n,
    TYPE: tl.constexpr,
    INVERSE_MAX: tl.constexpr,
    H_INVERSE_MAX: tl.constexpr,
    VALUES: tl.constexpr,  # dz in 16 bits
    SUMS: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    G: tl.constexpr,
    CODE: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    PADDED: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    F: tl.constexpr = 2 if GATED else 1
    t0, t, quad = block * 128, 4 * tl.arange(0, 32), tl.arange(0, 32)
    c0, c, g, real = strip_columns(tile, I, G, G, W, V)
    start = t0.to(tl.int64) * F * I + c0
    dh_ptr += t0.to(tl.int64) * I + c0
    amax_ptr += t0.to(tl.int64) * F * n
    a, b, h, inside = gradient_quads(
        dh_ptr, codes_ptr + start, amax_ptr, t, c, g, real, T - t0, n, I, n, FUNCTION, GATED, CODE
    )
    column, quads, stride_t = c0.to(tl.int64), (P - t0) // 4, P // 4
    place, turn = column * stride_t + t0 // 4, block.to(tl.int64) * F * I + column
    h_scale_ptr += block.to(tl.int64) * I + column
    if VALUES:
        tl.static_assert(not SUMS)
        h_inverse = store_scales(max_magnitude(quad_magnitude(*h), 0), h_scale_ptr, c, real, H_INVERSE_MAX)
        target = out_ptr + start + (t[:, None, None] * (F * I) + c[None, :, :])
        store_values(a, inside, target, F * I)
        if GATED:
            store_values(b, inside, target + I, F * I)
    else:
        # In one reduction they wait for each other's barriers once.
        if GATED:
            a_amax, b_amax, h_amax = three_amax(quad_magnitude(*a), quad_magnitude(*b), quad_magnitude(*h), 0)
            if SUMS:
                tl.store(partial_ptr + turn + c, quad_sum(a), mask=real)
                tl.store(partial_ptr + turn + I + c, quad_sum(b), mask=real)
        elif SUMS:
            total = (a[0] + a[1]) + (a[2] + a[3])
            h_amax, a_amax, total = two_amax_and_sum(quad_magnitude(*h), quad_magnitude(*a), total, 0)
            tl.store(partial_ptr + turn + c, total, mask=real)
        else:
            h_amax, a_amax = two_amax(quad_magnitude(*h), quad_magnitude(*a), 0)
        h_inverse = store_scales(h_amax, h_scale_ptr, c, real, H_INVERSE_MAX)
        out_t_ptr += place
        scale_t_ptr += turn
        a_inverse = store_scales(a_amax, scale_t_ptr, c, real, INVERSE_MAX)
        if GATED:
            b_inverse = store_scales(b_amax, scale_t_ptr + I, c, real, INVERSE_MAX)
        store_quads(a, inside, a_inverse, out_t_ptr, c, quad, real, quads, stride_t, PADDED, TYPE)
        if GATED:
            out_t_ptr += tl.cast(I, tl.int64) * stride_t
            store_quads(b, inside, b_inverse, out_t_ptr, c, quad, real, quads, stride_t, PADDED, TYPE)
    store_quads(h, inside, h_inverse, h_t_ptr + place, c, quad, real, quads, stride_t, PADDED, tl.float8e4nv)


# By measurement (docs/research/kernels.md), by whether there is a gate: with dz in FP8, and as it is.
GRADIENT_STRIPS = {True: Strip(32, 4, 4, 128), False: Strip(32, 4, 4, 80)}
VALUES_STRIPS = {True: Strip(32, 4, 8, 80), False: Strip(32, 8, 4, 128)}
GATED_SUMS_STRIP = Strip(32, 4, 4, None)


@activation_block_backward.cuda
def _(dh, codes, group_amax, fmt, has_bias, activation, code, group_size):
    (tokens, width), (_, parts, n), gated = dh.shape, group_amax.shape, group_amax.shape[1] == 2
    # With a gate, where I is no multiple of 128 a block of dz spans gate and up.
    if BLOCK % group_size or (fmt and gated and width % BLOCK):
        return activation_block_backward.reference(dh, codes, group_amax, fmt, has_bias, activation, code, group_size)
    dh, codes, group_amax = dense(dh, codes, group_amax)
    h_t, h_scale = empty_rows_t(dh, dh.shape, E4M3.dtype)
    if fmt is None:
        results = [dh.new_empty((tokens, parts * width)), h_t, h_scale]
        out, out_t, scale_t, strip = results[0], h_t, h_scale, VALUES_STRIPS[gated]
    else:
        out, scale = empty_rows(dh, (tokens, parts * width), FLOAT8[fmt].dtype)
        out_t, scale_t = empty_rows_t(dh, out.shape, out.dtype)
        results, strip = [out, scale, out_t, scale_t, h_t, h_scale], GRADIENT_STRIPS[gated]
    if gated and has_bias:
        strip = GATED_SUMS_STRIP
    partial = dh.new_empty((blocks(tokens) if has_bias else 0, parts * width), dtype=torch.float32)
    padded, rows, function = h_t.shape[1], row_tile(tokens), activation_of(activation).device
    if fmt:
        _activation_rows_kernel[(blocks(width), cdiv(tokens, rows))](
            dh, codes, group_amax, out, scale, tokens, width, n, inverse_max(fmt), function, gated, group_size,
            CODES[code], rows, num_warps=4, **EXACT,
        )  # fmt: skip
    _activation_columns_kernel[(cdiv(width, strip.columns), token_blocks(padded))](
        dh, codes, group_amax, out, out_t.view(torch.int32), scale_t, h_t.view(torch.int32), h_scale,
        partial if has_bias else h_scale, tokens, width, padded, n,
        TRITON_FLOAT8[fmt or "e4m3"], inverse_max(fmt or "e4m3"), inverse_max("e4m3"), fmt is None, has_bias,
        function, gated, group_size, CODES[code], strip.columns, strip.vector,
        padded > tokens, num_warps=strip.warps, maxnreg=registers(strip.registers, dh, group_size), **EXACT,
    )  # fmt: skip
    if fmt:
        results.append(sum_partials(partial)[0] if has_bias else partial.view(0))
    return results
