"""The MLP's activation, fused with the quantization of its input (saved) and of its output (the next GEMM's operand).

    h = f(z)                          z (T, I)
    h = f(gate) * up                  z (T, 2I) = gate, up        gated

One family of kernels serves all activations, gated or not. f and its derivative are in activation_functions.py; to add
one see docs/add-a-model.md.

Forward. One scale per tensor: one pass over z writes its 8-bit groups and finds max |h|, a second writes h in FP8.
Block scales: one pass does both. h is not saved: the backward recomputes it from the codes, and `activation_decode`
does so in 16 bits for adapters of an output layer.

Backward, from the saved codes:

    dz = dh f'(z)                             h = f(z)
    dz = (dh up f'(gate), dh f(gate))         h = f(gate) up        gated

With one scale per tensor dz is written directly in FP8 in both layouts, or in 16 bits, and h has the forward's scale.
With block scales dz is written in 16 bits, and h has a scale for each 128 tokens of a column, which one tile holds. The
scale of dz comes from a bound of |dz|, found before:

    |dz| <= max |dh| * max |f'|
    |dz| <= max |dh| * max(max |up| max |f'|, max |f|)      gated

Each maximum is over a group: of dh as read, of f and f' from the saved maxima of gate. The bound is the largest of all
groups. It was up to 7 times max |dz| in our trials: in a floating-point format that costs range, not precision.

Bytes moved, with V = T * I * 2 and F = 2 if gated, else 1:

    activation_encode            F V read, F V / 2 of codes written
    activation_quantize          F V read, V / 2 written
    activation_block_quantize    F V read, F V / 2 + V / 2 written
    activation_decode            F V / 2 read, V written
    activation_gradient_bound    V read
    activation_backward          V + F V / 2 read, F V + V / 2 written; for a bias F V / 16 more

Kernels equal their references bit for bit, except a bias's partial sums, which are added in another order.

Legend: T tokens, I intermediate width, P = T padded to a multiple of 16, G group size, GP = G rounded up to a power of
2, n = ceil(I / G) groups.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import (
    E4M3,
    FLOAT8,
    Quantized,
    cast_float8,
    decode_groups,
    encode_groups,
    quantize_tensor,
    to_groups,
)
from overcoat.kernels.activation_functions import ROUNDING, activation_of
from overcoat.kernels.blockwise import (
    BLOCK,
    Strip,
    blocks,
    empty_rows,
    empty_rows_t,
    quad_magnitude,
    row_blocks,
    row_blocks_t,
    row_tile,
    store_rows,
    store_scales,
    store_values,
    strip_columns,
    token_blocks,
)
from overcoat.kernels.codes import CODES, decode, empty_codes, store_codes
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
    to_float8,
)
from overcoat.kernels.groups import GROUP_TILE
from overcoat.kernels.instructions import arrived
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense, kernel, registers
from overcoat.kernels.op import op
from overcoat.kernels.partials import sum_partials
from overcoat.kernels.quantize import empty_both, padded_tokens, transpose_padded
from overcoat.kernels.tiles import group_columns, listed_groups, load_kept, store_quad_rows, store_quads

_ROUNDING = tl.constexpr(ROUNDING)

# ---- one scale per tensor -------------------------------------------------------------------------------------------


def activated(z: Tensor, activation: str, gated: bool) -> Tensor:
    """Return h (T, I) FP32 of z (T, I), or if `gated` of z (T, 2I) = gate, up."""
    gate, *up = z.contiguous().float().chunk(1 + gated, -1)
    h, _ = activation_of(activation).reference(gate)
    return h * up[0] if gated else h


def _encoded(z: Tensor, gated: bool, code: str, group_size: int) -> Tuple[Tensor, Tensor]:
    """Return codes (T, F I) and maxima (T, F, n) of z; no group spans gate and up."""
    tokens, parts = z.shape[0], 1 + gated
    codes, group_amax = encode_groups(z.reshape(tokens * parts, z.shape[1] // parts), code, group_size)
    return codes.view(tokens, -1), group_amax.view(tokens, parts, -1)


@op
def activation_encode(
    z: Tensor, activation: str, gated: bool, code: str, group_size: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """First pass over z (T, F I): return codes (T, F I), BF16 group maxima (T, F, n), and max |h|, 0-d FP32."""
    return *_encoded(z, gated, code, group_size), activated(z, activation, gated).abs().amax()


@activation_encode.fake
def _(z, activation, gated, code, group_size):
    groups = z.shape[0], 1 + gated, cdiv(z.shape[1] // (1 + gated), group_size)
    return *empty_codes(z, groups, code), z.new_empty((), dtype=torch.float32)


@triton.jit
def _encode_values(
    z_ptr, codes_ptr, amax_ptr, offsets, places, inside, known, CODE: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Load groups along the last axis, AXIS, store codes and maxima; return values and exact maxima, FP32."""
    x = tl.load(z_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    return x, store_codes(x, codes_ptr + offsets, amax_ptr + places, inside, known, CODE, AXIS)


@kernel
def _activation_encode_kernel(
    z_ptr,  # (T, F I)
    codes_ptr,  # (T, F I) 8-bit
    amax_ptr,  # (T, F, n) BF16
    top_ptr,  # 0-d FP32: max |h|
    groups,  # T * n
    n, I, FUNCTION: tl.constexpr, GATED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,  # noqa: E741
    CODE: tl.constexpr, NG: tl.constexpr,
):  # fmt: skip
    group, row, known, column, inside = listed_groups(groups, n, I, G, GP, NG)
    F: tl.constexpr = 2 if GATED else 1
    offsets, places = row.to(tl.int64)[:, None] * (F * I) + column, group + row * ((F - 1) * n)
    # From the L2 cache: the multiprocessor's own cache would hold the value that its first program read.
    seen = tl.load(top_ptr, cache_modifier=".cg")
    gate, gate_amax = _encode_values(z_ptr, codes_ptr, amax_ptr, offsets, places, inside, known, CODE, 1)
    bound = FUNCTION(gate_amax)[0]
    if GATED:
        up, up_amax = _encode_values(z_ptr + I, codes_ptr + I, amax_ptr + n, offsets, places, inside, known, CODE, 1)
        bound = bound * up_amax
    bound = tl.where(gate_amax < float("inf"), bound * _ROUNDING, float("nan"))
    # Computing h is half of the special function unit's work, and is skipped for groups whose bound does not exceed the
    # maximum found so far: 98% for normally distributed z. The result does not depend on the order of programs.
    if max_magnitude(bound, 0).to(tl.int32, bitcast=True) > seen.to(tl.int32, bitcast=True):
        h = FUNCTION(gate)[0]
        if GATED:
            h = h * up
        atomic_amax(top_ptr, max_magnitude(max_magnitude(h, 1), 0))


# Values that a program encodes. It has one warp: with more, warps that skip h would wait for those that do not.
ENCODE_TILE = 2048


@activation_encode.cuda
def _(z, activation, gated, code, group_size):
    z, parts, gp = z.contiguous(), 1 + gated, power_of_2(group_size)
    codes, group_amax = empty_codes(z, (z.shape[0], parts, cdiv(z.shape[1] // parts, group_size)), code)
    top = z.new_zeros((), dtype=torch.float32)
    n, count = group_amax.shape[2], max(ENCODE_TILE // (parts * gp), 1)
    _activation_encode_kernel[(cdiv(z.shape[0] * n, count),)](
        z, codes, group_amax, top, z.shape[0] * n, n, z.shape[1] // parts, activation_of(activation).device,
        gated, group_size, gp, CODES[code], count, num_warps=1, **EXACT,
    )  # fmt: skip
    return codes, group_amax, top


@op
def activation_quantize(z: Tensor, amax: Tensor, activation: str, gated: bool) -> Tuple[Tensor, Tensor]:
    """Second pass: return h in E4M3 (T, I), and its 0-d FP32 scale for `amax` = max |h|."""
    data, scale = quantize_tensor(activated(z, activation, gated), E4M3, amax)
    return data, scale


@activation_quantize.fake
def _(z, amax, activation, gated):
    return z.new_empty(z.shape[0], z.shape[1] // (1 + gated), dtype=E4M3.dtype), torch.empty_like(amax)


@kernel
def _activation_quantize_kernel(
    z_ptr,  # (T, 2I), or all values in one row without a gate
    amax_ptr,  # 0-d FP32
    h_ptr,  # (T, I) E4M3
    scale_ptr,  # 0-d FP32
    I, INVERSE_MAX: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,  # noqa: E741
):  # fmt: skip
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) == 0)
    if GATED:
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        z_ptr += row * 2 * I
        h_ptr += row * I
    else:
        column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = FUNCTION(tl.load(z_ptr + column, mask=column < I, other=0.0).to(tl.float32))[0]
    if GATED:
        h = h * tl.load(z_ptr + I + column, mask=column < I, other=0.0).to(tl.float32)
    tl.store(h_ptr + column, to_float8(h * inverse_of(scale), tl.float8e4nv), mask=column < I)


# Columns of h per program.
QUANTIZE_TILE = 2048


@activation_quantize.cuda
def _(z, amax, activation, gated):
    z = z.contiguous()
    tokens, width = z.shape[0], z.shape[1] // (1 + gated)
    h, scale = z.new_empty(tokens, width, dtype=E4M3.dtype), torch.empty_like(amax)
    columns = width if gated else z.numel()
    tiles = cdiv(columns, QUANTIZE_TILE)
    _activation_quantize_kernel[(tokens, tiles) if gated else (tiles,)](
        z, amax, h, scale, columns, inverse_max("e4m3"), activation_of(activation).device, gated, QUANTIZE_TILE,
        num_warps=4, **EXACT,
    )  # fmt: skip
    return h, scale


# ---- block scales ---------------------------------------------------------------------------------------------------


@op
def activation_block_quantize(
    z: Tensor, activation: str, gated: bool, code: str, group_size: int
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h in E4M3 (T, I) and its scale (ceil(I / 128), T); codes (T, F I) of z and BF16 maxima (T, F, n)."""
    return *row_blocks(activated(z, activation, gated), E4M3), *_encoded(z, gated, code, group_size)


@kernel
def _activation_block_kernel(
    z_ptr,  # (T, F I)
    h_ptr,  # (T, I) E4M3
    scale_ptr,  # (ceil(I / 128), T) FP32
    codes_ptr,  # (T, F I) 8-bit
    amax_ptr,  # (T, F, n) BF16
    T, I, n, INVERSE_MAX: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, G: tl.constexpr,  # noqa: E741
    CODE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    NG: tl.constexpr = 128 // G
    F: tl.constexpr = 2 if GATED else 1
    t0, g0, t, g = tl.program_id(1) * BT, tl.program_id(0) * NG, tl.arange(0, BT), tl.arange(0, NG)
    c = g[:, None] * G + tl.arange(0, G)[None, :]  # (NG, G), from column g0 * G on
    inside = (t < T - t0)[:, None, None] & (c < I - g0 * G)[None, :, :]
    known = (t < T - t0)[:, None] & (g < n - g0)[None, :]
    start = t0.to(tl.int64) * F * I + g0 * G
    z_ptr += start
    codes_ptr += start
    amax_ptr += t0.to(tl.int64) * F * n + g0
    offsets, places = t[:, None, None] * (F * I) + c[None, :, :], t[:, None] * (F * n) + g[None, :]
    gate, _ = _encode_values(z_ptr, codes_ptr, amax_ptr, offsets, places, inside, known, CODE, 2)
    if GATED:
        up, _ = _encode_values(z_ptr + I, codes_ptr + I, amax_ptr + n, offsets, places, inside, known, CODE, 2)
    h = FUNCTION(gate)[0]
    if GATED:
        h = h * up
    h_ptr += t0.to(tl.int64) * I + g0 * G
    scale_ptr += tl.program_id(0).to(tl.int64) * T + t0
    store_rows(h, t, T - t0, h_ptr, scale_ptr, t[:, None, None] * I + c[None, :, :], inside, INVERSE_MAX)


@activation_block_quantize.cuda
def _(z, activation, gated, code, group_size):
    if BLOCK % group_size:
        return activation_block_quantize.reference(z, activation, gated, code, group_size)
    z, parts = z.contiguous(), 1 + gated
    tokens, width = z.shape[0], z.shape[1] // parts
    h, scale = empty_rows(z, (tokens, width), E4M3.dtype)
    codes, group_amax = empty_codes(z, (tokens, parts, cdiv(width, group_size)), code)
    rows = row_tile(tokens)
    _activation_block_kernel[(blocks(width), cdiv(tokens, rows))](
        z, h, scale, codes, group_amax, tokens, width, group_amax.shape[2], inverse_max("e4m3"),
        activation_of(activation).device, gated, group_size, CODES[code], rows, num_warps=4, **EXACT,
    )  # fmt: skip
    return h, scale, codes, group_amax


# ---- h again, from the codes -----------------------------------------------------------------------------------------


def decoded(codes: Tensor, group_amax: Tensor, code: str, group_size: int) -> Tuple[Tensor, ...]:
    """Decode codes (T, F I) with maxima (T, F, n) to (z,) or (gate, up), (T, I) FP32 each."""
    tokens, parts, _ = group_amax.shape
    kept = Quantized(codes.reshape(tokens * parts, -1), group_amax.flatten(0, 1))
    return decode_groups(kept, code, group_size).view(tokens, parts, -1).unbind(1)


@op
def activation_decode(
    codes: Tensor, group_amax: Tensor, activation: str, code: str, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Return h (T, I) from codes (T, F I) and BF16 maxima (T, F, n), rounded to `dtype`."""
    gate, *up = decoded(codes, group_amax, code, group_size)
    h, _ = activation_of(activation).reference(gate)
    return (h * up[0] if up else h).to(dtype)


@activation_decode.fake
def _(codes, group_amax, activation, code, group_size, dtype):
    return codes.new_empty(codes.shape[0], codes.shape[1] // group_amax.shape[1], dtype=dtype)


@kernel
def _activation_decode_kernel(
    codes_ptr,  # (T, F I) 8-bit
    amax_ptr,  # (T, F, n) BF16
    h_ptr,  # (T, I)
    groups,  # T * n
    n, I, FUNCTION: tl.constexpr, GATED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,  # noqa: E741
    CODE: tl.constexpr, NG: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = 2 if GATED else 1
    group, row, known, column, inside = listed_groups(groups, n, I, G, GP, NG)
    start = row.to(tl.int64)
    codes_ptr += start[:, None] * (F * I) + column
    amax_ptr += group + start * ((F - 1) * n)
    h = FUNCTION(decode(*load_kept(codes_ptr, amax_ptr, inside, known, 1), CODE))[0]
    if GATED:
        h = h * decode(*load_kept(codes_ptr + I, amax_ptr + n, inside, known, 1), CODE)
    tl.store(h_ptr + (start[:, None] * I + column), h.to(h_ptr.dtype.element_ty), mask=inside)


@activation_decode.cuda
def _(codes, group_amax, activation, code, group_size, dtype):
    codes, group_amax = dense(codes, group_amax)
    (tokens, parts, n), padded = group_amax.shape, power_of_2(group_size)
    h = torch.empty((tokens, codes.shape[1] // parts), dtype=dtype, device=codes.device)
    count = max(GROUP_TILE // 2 // padded, 1)
    _activation_decode_kernel[(cdiv(tokens * n, count),)](
        codes, group_amax, h, tokens * n, n, h.shape[1], activation_of(activation).device, parts == 2, group_size,
        padded, CODES[code], count, num_warps=4, **EXACT,
    )  # fmt: skip
    return h


def gradient(
    dh: Tensor, codes: Tensor, group_amax: Tensor, activation: str, code: str, group_size: int
) -> Tuple[Tensor, Tensor]:
    """Return dz (T, F I) and h (T, I), both FP32, from the saved codes."""
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
    """Load rows t of a tile (BT, NG, GP), of which `rows` and `groups` exist.

    Returns dh, codes of gate (or z) and of up (unused without a gate), their maxima (BT, NG, 1), and which are inside.
    """
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
    """Return dgate, dup, h of `load_operands`' results, after the load of `awaited`'s dh; and which are inside."""
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
    """Return dgate, dup, h and which are inside, four of each, of rows t to t + 3."""
    x0 = load_operands(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n, GATED)
    x1 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 1, c, g, real, rows, groups, I, n, GATED)
    x2 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 2, c, g, real, rows, groups, I, n, GATED)
    x3 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 3, c, g, real, rows, groups, I, n, GATED)
    # Each waits for another's load, so that all loads are issued before any arithmetic begins.
    a0, b0, h0, in0 = gradient_of(x0, x3, FUNCTION, GATED, CODE)
    a1, b1, h1, in1 = gradient_of(x1, x2, FUNCTION, GATED, CODE)
    a2, b2, h2, in2 = gradient_of(x2, x1, FUNCTION, GATED, CODE)
    a3, b3, h3, in3 = gradient_of(x3, x0, FUNCTION, GATED, CODE)
    return (a0, a1, a2, a3), (b0, b1, b2, b3), (h0, h1, h2, h3), (in0, in1, in2, in3)


@triton.jit
def quad_sum(x):
    """Return the sum over the tokens of a tile, given as four rows."""
    return tl.sum((x[0] + x[1]) + (x[2] + x[3]), 0)


# ---- one scale per tensor: a bound of |dz|, for its scale before dz is computed --------------------------------------


@op
def activation_gradient_bound(dh: Tensor, group_amax: Tensor, activation: str, group_size: int) -> Tensor:
    """Return an upper bound of |dz|, 0-d FP32, from dh (T, I) and the saved maxima (T, F, n); not finite where dh, z or
    a product of their maxima is not."""
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
    # From the L2 cache: the multiprocessor's own cache would hold the value that its first program read.
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


# Elements of dh per program.
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
    """Return dz, in FP8 in both layouts or in 16 bits, and h.

    Args:
        dh: (T, I), gradient of h; codes, group_amax: as saved.
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
    # Strips are narrow: adjacent ones share cache lines, so they run one after the other.
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


# Tiles of 32 tokens, or with block scales of 128; keys: gated or not (docs/research/kernels.md). With a gate and sums
# there are fewer warps, since sums across warps are slow, and more registers.
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
