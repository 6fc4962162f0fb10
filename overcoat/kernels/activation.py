"""The MLP's activation, fused with the quantization of its input (kept) and of its output (the next GEMM's operand).

    h = f(z)                          z (T, I)
    h = f(gate) * up                  z (T, 2I) = gate, up        gated

f is an entry of activation_functions.py; here is one family of kernels for all of them, gated or not.

One scale per tensor: one pass over z writes its 8-bit groups and finds max |h|, a second writes h in FP8. Block scales:
one pass does both. h is not kept: the backward (activation_backward.py) rebuilds it from the codes, and
`activation_decode` in 16 bits for adapters of an output layer. Bytes moved, with V = T * I * 2 and F = 2 if gated,
else 1:

    activation_encode           F V read, F V / 2 of codes written
    activation_quantize         F V read, V / 2 written
    activation_block_quantize   F V read, F V / 2 + V / 2 written
    activation_decode           F V / 2 read, V written

Kernels equal their references bit for bit.

Legend: T tokens, I intermediate width, G group size, GP = G rounded up to a power of 2, n = ceil(I / G) groups.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from overcoat.formats import E4M3, Quantized, decode_groups, encode_groups, quantize_tensor
from overcoat.kernels.activation_functions import ROUNDING, activation_of
from overcoat.kernels.block_tiles import row_tile, store_rows
from overcoat.kernels.blockwise import BLOCK, blocks, empty_rows, row_blocks
from overcoat.kernels.codes import CODES, decode, empty_codes, store_codes
from overcoat.kernels.device import (
    EXACT,
    atomic_amax,
    inverse_max,
    inverse_of,
    max_magnitude,
    power_of_2,
    scale_of,
    to_float8,
)
from overcoat.kernels.groups import GROUP_TILE
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense, kernel
from overcoat.kernels.op import op
from overcoat.kernels.tiles import listed_groups, load_kept

_ROUNDING = tl.constexpr(ROUNDING)

# ---- one scale per tensor -------------------------------------------------------------------------------------------


def activated(z: Tensor, activation: str, gated: bool) -> Tensor:
    """h (T, I) FP32 of z (T, I), or of gate and up in z (T, 2I) if `gated`."""
    gate, *up = z.contiguous().float().chunk(1 + gated, -1)
    h, _ = activation_of(activation).reference(gate)
    return h * up[0] if gated else h


def _encoded(z: Tensor, gated: bool, code: str, group_size: int) -> Tuple[Tensor, Tensor]:
    """Codes (T, F I) and maxima (T, F, n) of z; no group spans gate and up."""
    tokens, parts = z.shape[0], 1 + gated
    codes, group_amax = encode_groups(z.reshape(tokens * parts, z.shape[1] // parts), code, group_size)
    return codes.view(tokens, -1), group_amax.view(tokens, parts, -1)


@op
def activation_encode(
    z: Tensor, activation: str, gated: bool, code: str, group_size: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """First pass over z (T, F I): its codes (T, F I), BF16 group maxima (T, F, n), and max |h|, 0-d FP32."""
    return *_encoded(z, gated, code, group_size), activated(z, activation, gated).abs().amax()


@activation_encode.fake
def _(z, activation, gated, code, group_size):
    groups = z.shape[0], 1 + gated, cdiv(z.shape[1] // (1 + gated), group_size)
    return *empty_codes(z, groups, code), z.new_empty((), dtype=torch.float32)


@triton.jit
def _encode_values(
    z_ptr, codes_ptr, amax_ptr, offsets, places, inside, known, CODE: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Load groups along the last axis, number AXIS, and write their codes and maxima; values and exact maxima, FP32."""
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
    # From L2: what this multiprocessor's own cache holds is as old as its first program.
    seen = tl.load(top_ptr, cache_modifier=".cg")
    gate, gate_amax = _encode_values(z_ptr, codes_ptr, amax_ptr, offsets, places, inside, known, CODE, 1)
    bound = FUNCTION(gate_amax)[0]
    if GATED:
        up, up_amax = _encode_values(z_ptr + I, codes_ptr + I, amax_ptr + n, offsets, places, inside, known, CODE, 1)
        bound = bound * up_amax
    bound = tl.where(gate_amax < float("inf"), bound * _ROUNDING, float("nan"))
    # h costs half of the special function unit's work. Groups that cannot hold a larger one than what others have found
    # need none: 98% of a normal tensor's. The result does not depend on who comes first.
    if max_magnitude(bound, 0).to(tl.int32, bitcast=True) > seen.to(tl.int32, bitcast=True):
        h = FUNCTION(gate)[0]
        if GATED:
            h = h * up
        atomic_amax(top_ptr, max_magnitude(max_magnitude(h, 1), 0))


# Values that a program encodes. It is one warp: of several, some would look for a maximum and wait for the others.
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
    """Second pass: h in E4M3 (T, I) with one scale, and its 0-d FP32 scale for `amax` = max |h|."""
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


# Columns whose h a program takes.
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
    """h in E4M3 (T, I) and its scale (ceil(I / 128), T); codes (T, F I) of z and their BF16 maxima (T, F, n)."""
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
    """z (T, I), or gate and up, in FP32 from codes (T, F I) and maxima (T, F, n)."""
    tokens, parts, _ = group_amax.shape
    kept = Quantized(codes.reshape(tokens * parts, -1), group_amax.flatten(0, 1))
    return decode_groups(kept, code, group_size).view(tokens, parts, -1).unbind(1)


@op
def activation_decode(
    codes: Tensor, group_amax: Tensor, activation: str, code: str, group_size: int, dtype: torch.dtype
) -> Tensor:
    """h (T, I) of codes (T, F I) and BF16 maxima (T, F, n), rounded to `dtype`."""
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
