"""The backward of activation.py: gradient of z from the kept codes, and h rebuilt as transposed GEMM operand.

    dz = dh f'(z)                             h = f(z)
    dz = (dh up f'(gate), dh f(gate))         h = f(gate) up        gated

With one scale per tensor dz goes straight into FP8 in both layouts, or stays in 16 bits, and h has the forward's scale.
With block scales dz stays in 16 bits, and h has a scale for each 128 tokens of a column: a tile holds all of them.

The scale of dz is that of a bound, found before:

    |dz| <= max |dh| * max |f'|
    |dz| <= max |dh| * max(max |up| max |f'|, max |f|)      gated

Each maximum is a group's: of dh as read, of f and f' as the kept maxima of gate allow. The largest of all groups is up
to 7 times max |dz| on what was tried: in a floating-point format that costs range, not precision. Bytes moved, with
V = T * I * 2 and F = 2 if gated, else 1:

    activation_gradient_bound    V read
    activation_backward          V + F V / 2 read, F V + V / 2 written

and, for a bias, each tile's sums over its tokens, F V / 16. Kernels equal their references bit for bit, but for these
sums, which add in another order.

Legend: T tokens, I intermediate width, P = T padded to a multiple of 16, G group size, GP = G rounded up to a power of
2, n = ceil(I / G) groups.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import E4M3, FLOAT8, cast_float8, quantize_tensor, to_groups
from overcoat.kernels.activation import decoded
from overcoat.kernels.activation_functions import ROUNDING, activation_of
from overcoat.kernels.block_tiles import Strip, quad_magnitude, store_scales, store_values, strip_columns, token_blocks
from overcoat.kernels.blockwise import BLOCK, empty_rows_t, row_blocks_t
from overcoat.kernels.codes import CODES, decode
from overcoat.kernels.device import (
    EXACT,
    as_words,
    atomic_amax,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    power_of_2,
    scale_of,
)
from overcoat.kernels.instructions import arrived
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense, kernel, registers
from overcoat.kernels.op import op
from overcoat.kernels.partials import sum_partials
from overcoat.kernels.quantize import empty_both, padded_tokens, transpose_padded
from overcoat.kernels.tiles import group_columns, listed_groups, load_kept, store_quad_rows, store_quads


def gradient(
    dh: Tensor, codes: Tensor, group_amax: Tensor, activation: str, code: str, group_size: int
) -> Tuple[Tensor, Tensor]:
    """dz (T, F I) and h (T, I), both FP32, from the kept codes."""
    gate, *up = decoded(codes, group_amax, code, group_size)
    value, slope = activation_of(activation).reference(gate)
    dh = dh.contiguous().float()
    if not up:
        return dh * slope, value
    return torch.cat((dh * up[0] * slope, dh * value), -1), value * up[0]


@triton.jit
def load_operands(
    dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n, GATED: tl.constexpr  # noqa: E741
):  # fmt: skip
    """Rows t of a tile (BT, NG, GP), of which `rows` and `groups` exist: dh, codes of gate and of up, their maxima
    (BT, NG, 1), and which are inside; without a gate z is in its place, and up means nothing."""
    F: tl.constexpr = 2 if GATED else 1
    inside = (t < rows)[:, None, None] & real[None, :, :]
    dh = tl.load(dh_ptr + (t[:, None, None] * I + c[None, :, :]), mask=inside, other=0.0)
    known = (t < rows)[:, None] & (g < groups)[None, :]
    amax_ptr += t[:, None] * (F * n) + g[None, :]
    codes_ptr += t[:, None, None] * (F * I) + c[None, :, :]
    gate, amax = load_kept(codes_ptr, amax_ptr, inside, known, 2)
    up, up_amax = gate, amax
    if GATED:
        up, up_amax = load_kept(codes_ptr + I, amax_ptr + n, inside, known, 2)
    return dh, gate, up, amax, up_amax, inside


@triton.jit
def gradient_of(operands, awaited, FUNCTION: tl.constexpr, GATED: tl.constexpr, CODE: tl.constexpr):
    """dgate, dup, h of what `load_operands` gave, not before `awaited` operands' dh is there; and which are inside."""
    dh, gate, up, gate_amax, up_amax, inside = operands
    value, slope = FUNCTION(decode(arrived(gate, awaited[0]), gate_amax, CODE))
    dh = dh.to(tl.float32)
    if GATED:
        up = decode(up, up_amax, CODE)
        return dh * up * slope, dh * value, value * up, inside
    else:
        dz = dh * slope
        return dz, dz, value, inside


@triton.jit
def gradient_quads(
    dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n,  # noqa: E741
    FUNCTION: tl.constexpr, GATED: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Rows t to t + 3: four of dgate, of dup, of h, and of which are inside."""
    x0 = load_operands(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n, GATED)
    x1 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 1, c, g, real, rows, groups, I, n, GATED)
    x2 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 2, c, g, real, rows, groups, I, n, GATED)
    x3 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 3, c, g, real, rows, groups, I, n, GATED)
    # Crosswise, so that all loads are under way before the arithmetic on any begins.
    a0, b0, h0, in0 = gradient_of(x0, x3, FUNCTION, GATED, CODE)
    a1, b1, h1, in1 = gradient_of(x1, x2, FUNCTION, GATED, CODE)
    a2, b2, h2, in2 = gradient_of(x2, x1, FUNCTION, GATED, CODE)
    a3, b3, h3, in3 = gradient_of(x3, x0, FUNCTION, GATED, CODE)
    return (a0, a1, a2, a3), (b0, b1, b2, b3), (h0, h1, h2, h3), (in0, in1, in2, in3)


@triton.jit
def quad_sum(x):
    """Four rows' sum over the tokens of a tile."""
    return tl.sum((x[0] + x[1]) + (x[2] + x[3]), 0)


# ---- one scale per tensor: a bound of the gradient, the scale of dz before dz is there -------------------------------

_ROUNDING = tl.constexpr(ROUNDING)


@op
def activation_gradient_bound(dh: Tensor, group_amax: Tensor, activation: str, group_size: int) -> Tensor:
    """What no |dz| exceeds, 0-d FP32, of dh (T, I) and the kept maxima (T, F, n); not finite where dh, z or a product
    of their maxima is not."""
    function, peak = activation_of(activation).reference, activation_of(activation).peak
    gate, *up = group_amax.float().unbind(1)
    largest = to_groups(dh, group_size).abs().amax(-1).float()  # (T, n)
    _, slope = function(gate.clamp(max=peak))
    bound = torch.maximum(largest * up[0] * slope, largest * function(gate)[0]) if up else largest * slope
    return torch.where(gate < torch.inf, bound, torch.nan).amax() * ROUNDING


@activation_gradient_bound.fake
def _(dh, group_amax, activation, group_size):
    return dh.new_empty((), dtype=torch.float32)


@kernel
def _activation_bound_kernel(
    dh_ptr,  # (T, I)
    amax_ptr,  # (T, F, n) BF16
    top_ptr,  # 0-d FP32: the bound
    groups,  # T * n
    n, I, FUNCTION: tl.constexpr, PEAK: tl.constexpr, GATED: tl.constexpr, G: tl.constexpr,  # noqa: E741
    GP: tl.constexpr, NG: tl.constexpr,
):  # fmt: skip
    # From L2: what this multiprocessor's own cache holds is as old as its first program.
    seen = tl.load(top_ptr, cache_modifier=".cg")
    group, row, known, column, inside = listed_groups(groups, n, I, G, GP, NG)
    dh = tl.load(dh_ptr + (row.to(tl.int64)[:, None] * I + column), mask=inside, other=0.0)
    places = group + row * n if GATED else group  # among (T, F, n)
    gate = tl.load(amax_ptr + places, mask=known, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(amax_ptr + n + places, mask=known, other=0.0).to(tl.float32)
    largest = max_magnitude(dh.to(tl.float32), 1)
    slope = FUNCTION(tl.minimum(gate, PEAK))[1]
    bound = largest * slope
    if GATED:
        bound = larger(largest * up * slope, largest * FUNCTION(gate)[0])
    bound = max_magnitude(tl.where(gate < float("inf"), bound, float("nan")), 0) * _ROUNDING
    if bound.to(tl.int32, bitcast=True) > seen.to(tl.int32, bitcast=True):
        atomic_amax(top_ptr, bound)


# Gradients of a program that bounds them.
BOUND_TILE = 4096


@activation_gradient_bound.cuda
def _(dh, group_amax, activation, group_size):
    dh, group_amax = dense(dh, group_amax)
    (tokens, width), (_, parts, n) = dh.shape, group_amax.shape
    chosen, gp = activation_of(activation), power_of_2(group_size)
    top, count = dh.new_zeros((), dtype=torch.float32), max(BOUND_TILE // gp, 1)
    _activation_bound_kernel[(cdiv(tokens * n, count),)](
        dh, group_amax, top, tokens * n, n, width, chosen.device, chosen.peak, parts == 2, group_size, gp, count,
        num_warps=1, **EXACT,
    )  # fmt: skip
    return top


@op
def activation_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, scale: Optional[Tensor], amax: Optional[Tensor], fmt: Optional[str],
    has_bias: bool, activation: str, code: str, group_size: int,
) -> List[Tensor]:  # fmt: skip
    """dz, in FP8 in both layouts or in 16 bits, and h.

    Args:
        dh: (T, I), gradient of h; codes, group_amax: as kept.
        scale: that of h, from `activation_quantize`; None: block scales, dz in 16 bits.
        fmt: "e4m3" or "e5m2", amax: max |dz| or more, and has_bias: whether z's projection has a bias; None, None and
            False for 16 bits.

    Returns:
        In 16 bits: dz (T, F I) in dh's dtype; h as transposed E4M3 operand (I, P); with block scales h's scale
        (ceil(T / 128), I). In FP8: dz (T, F I); dz transposed (F I, P); their 0-d FP32 scale; sum of dz over the tokens
        (F I,) FP32, before it is rounded, empty without a bias; h.
    """
    dz, h = gradient(dh, codes, group_amax, activation, code, group_size)
    if scale is None:
        return [dz.to(dh.dtype), *row_blocks_t(h, E4M3)]
    h_t = transpose_padded(cast_float8(h * (1.0 / scale), E4M3))
    if fmt is None:
        return [dz.to(dh.dtype), h_t]
    data, d_scale = quantize_tensor(dz, FLOAT8[fmt], amax)
    return [data, transpose_padded(data), d_scale, dz.sum(0) if has_bias else dz.new_empty(0), h_t]


@activation_backward.fake
def _(dh, codes, group_amax, scale, amax, fmt, has_bias, activation, code, group_size):
    (h_t, h_scale), columns = empty_rows_t(dh, dh.shape, E4M3.dtype), codes.shape[1]
    if fmt is None:
        return [dh.new_empty(codes.shape), h_t] if scale is not None else [dh.new_empty(codes.shape), h_t, h_scale]
    return [*empty_both(dh, fmt, columns), dh.new_empty(columns if has_bias else 0, dtype=torch.float32), h_t]


@kernel
def _activation_gradient_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, F I) 8-bit
    group_amax_ptr,  # (T, F, n) BF16
    h_scale_ptr,  # 0-d FP32: scale of h; (ceil(T / 128), I) FP32, written, if BLOCKS
    amax_ptr,  # 0-d FP32: bound of |dz|, unless VALUES
    out_ptr,  # (T, F I): dz
    out_t_ptr,  # (F I, P) FP8, of which four are stored together, unless VALUES
    scale_ptr,  # 0-d FP32: scale of dz, unless VALUES
    h_t_ptr,  # (I, P) E4M3, of which four are stored together
    partial_ptr,  # (ceil(P / BT), F I) FP32: sums over a tile's tokens, if SUMS
    T, I, P, n,  # noqa: E741
    INVERSE_MAX: tl.constexpr, H_INVERSE_MAX: tl.constexpr,
    VALUES: tl.constexpr,  # dz in 16 bits
    BLOCKS: tl.constexpr,  # block scales
    SUMS: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    CODE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = 2 if GATED else 1
    # Strips are narrow: neighbours, which share lines of memory, follow each other.
    block, tile = tl.program_id(1 if BLOCKS else 0), tl.program_id(0 if BLOCKS else 1)
    t0, quad = block * BT, tl.arange(0, BT // 4)
    if BLOCKS:
        g0 = 0
        c0, c, g, real = strip_columns(tile, I, G, GP, BC, COLUMNS)
    else:
        g0 = tile * (BC // GP)
        g, c, real = group_columns(g0, I, G, GP, BC // GP, COLUMNS)
        c0 = g0 * G
    start = t0.to(tl.int64) * F * I + c0
    dh_ptr += t0.to(tl.int64) * I + c0
    codes_ptr += start
    group_amax_ptr += t0.to(tl.int64) * F * n + g0
    t, rows, groups = 4 * quad, T - t0, n - g0
    a, b, h, inside = gradient_quads(
        dh_ptr, codes_ptr, group_amax_ptr, t, c, g, real, rows, groups, I, n, FUNCTION, GATED, CODE
    )
    if SUMS:
        partial_ptr += block.to(tl.int64) * F * I + c0
        tl.store(partial_ptr + c, quad_sum(a), mask=real)
        if GATED:
            tl.store(partial_ptr + I + c, quad_sum(b), mask=real)
    quads, stride_t = (P - t0) // 4, P // 4
    first = c0.to(tl.int64) * stride_t + t0 // 4
    if BLOCKS:
        h_scale_ptr += block.to(tl.int64) * I + c0
        h_inverse = store_scales(max_magnitude(quad_magnitude(*h), 0), h_scale_ptr, c, real, H_INVERSE_MAX)
    else:
        h_inverse = inverse_of(tl.load(h_scale_ptr))
    store_quads(
        h, inside, h_inverse, as_words(h_t_ptr, 32) + first, c, quad, real, quads, stride_t, PADDED, tl.float8e4nv
    )
    offsets = t[:, None, None] * (F * I) + c[None, :, :]
    out_ptr += start
    if VALUES:
        store_values(a, inside, out_ptr + offsets, F * I)
        if GATED:
            store_values(b, inside, out_ptr + I + offsets, F * I)
    else:
        TYPE: tl.constexpr = out_ptr.dtype.element_ty
        scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
        tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) == 0)
        inverse = inverse_of(scale)
        out_t_ptr = as_words(out_t_ptr, 32) + first
        store_quad_rows(a, inside, inverse, out_ptr, F * I, offsets)
        store_quads(a, inside, inverse, out_t_ptr, c, quad, real, quads, stride_t, PADDED, TYPE)
        if GATED:
            store_quad_rows(b, inside, inverse, out_ptr + I, F * I, offsets)
            out_t_ptr += tl.cast(I, tl.int64) * stride_t
            store_quads(b, inside, inverse, out_t_ptr, c, quad, real, quads, stride_t, PADDED, TYPE)


# Tiles of 32 tokens, and with block scales of 128, by whether there is a gate (docs/research/kernels.md). With a gate
# and sums fewer warps, which add up less across each other, and more registers.
TILES = {True: Strip(128, 16, 8, 64), False: Strip(128, 4, 4, 80)}
BLOCK_TILES = {True: Strip(32, 4, 8, 80), False: Strip(32, 8, 4, 128)}
GATED_SUMS_TILE = Strip(128, 4, 4, 128)
TILE_TOKENS = 32


@activation_backward.cuda
def _(dh, codes, group_amax, scale, amax, fmt, has_bias, activation, code, group_size):
    is_blocks = scale is None
    if is_blocks and BLOCK % group_size:
        return activation_backward.reference(
            dh, codes, group_amax, scale, amax, fmt, has_bias, activation, code, group_size
        )
    dh, codes, group_amax = dense(dh, codes, group_amax)
    (tokens, width), (_, parts, n), padded = dh.shape, group_amax.shape, padded_tokens(dh.shape[0])
    h_t, h_scale = (
        empty_rows_t(dh, dh.shape, E4M3.dtype) if is_blocks else (dh.new_empty(width, padded, dtype=E4M3.dtype), scale)
    )
    out = dh.new_empty(tokens, parts * width, dtype=FLOAT8[fmt].dtype if fmt else dh.dtype)
    out_t, d_scale = (out.new_empty(parts * width, padded), torch.empty_like(amax)) if fmt else (h_t, h_scale)
    gated, gp, rows = parts == 2, power_of_2(group_size), BLOCK if is_blocks else TILE_TOKENS
    tile = BLOCK_TILES[gated] if is_blocks else GATED_SUMS_TILE if gated and has_bias else TILES[gated]
    turns, columns = cdiv(padded, rows), tile.columns if is_blocks else max(tile.columns, gp)
    grid = (cdiv(width, columns), token_blocks(padded)) if is_blocks else (turns, cdiv(n, columns // gp))
    partial = dh.new_empty(turns if has_bias else 0, parts * width, dtype=torch.float32)
    _activation_gradient_kernel[grid](
        dh, codes, group_amax, h_scale, h_scale if amax is None else amax, out, out_t, d_scale,
        h_t, partial if has_bias else h_scale, tokens, width, padded, n, inverse_max(fmt or "e4m3"),
        inverse_max("e4m3"), fmt is None, is_blocks, has_bias, activation_of(activation).device, gated, group_size, gp,
        CODES[code], rows, columns, padded > tokens, tile.vector, num_warps=tile.warps,
        maxnreg=registers(tile.registers, dh, group_size), **EXACT,
    )  # fmt: skip
    if fmt is None:
        return [out, h_t, h_scale] if is_blocks else [out, h_t]
    return [out, out_t, d_scale, sum_partials(partial)[0] if has_bias else partial.view(0), h_t]
