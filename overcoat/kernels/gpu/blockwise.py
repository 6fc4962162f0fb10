"""Kernels of kernels/blockwise.py: FP8 operands with 1x128 and 128x128 scales.

All are bound by memory. With N elements of 2 bytes the bytes moved are: block_quantize, block_quantize_t and
block_stack_weights 3N; block_quantize_both 4N; block_requantize_t 2N. Each input is read once.

What a program's tile looks like and how it is written: block_tiles.py.

Legend: T tokens (rows), C columns, P padded tokens, G group size, GP = G rounded up to a power of 2, n = ceil(C / G).
"""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, FLOAT8
from overcoat.kernels.blockwise import BLOCK, blocks, empty_rows, empty_rows_t, padded_blocks
from overcoat.kernels.gpu.block_tiles import (
    Strip,
    quad_magnitude,
    row_tile,
    store_columns,
    store_rows,
    store_scales,
    strip_columns,
    token_blocks,
)
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    inverse_max,
    larger,
    max_magnitude,
    pack_rows,
    power_of_2,
    scale_of,
    to_float8,
)
from overcoat.kernels.gpu.hardware import reciprocal
from overcoat.kernels.gpu.launch import cdiv, dense, kernel, on_device
from overcoat.kernels.gpu.stack import alignment, choose, launches, promise, three
from overcoat.kernels.gpu.tiles import decode_rows, store_quads

# Warps of a tile of 128 x 128: of weights; of activations, where fewer have fewer parts of a maximum to put together.
SQUARE_WARPS, TILE_WARPS = 8, 4
# By measurement (docs/log-kernels.md).
REQUANTIZE_STRIP = Strip(64, 4, 4, None)


# ---- activations and gradients --------------------------------------------------------------------------------------


@kernel
def _rows_kernel(
    x_ptr,  # (T, C)
    out_ptr,  # (T, C) FP8
    scale_ptr,  # (ceil(C / 128), T) FP32
    T,
    C,
    INVERSE_MAX: tl.constexpr,
    BT: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    t0, c0 = block * BT, tile * 128
    t, c = tl.arange(0, BT), tl.arange(0, 128)[None, :]
    inside = (t < T - t0)[:, None, None] & (c < C - c0)[None, :, :]
    offsets = t[:, None, None] * C + c[None, :, :]
    start = t0.to(tl.int64) * C + c0
    x = tl.load(x_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
    scale_ptr += tile.to(tl.int64) * T + t0
    store_rows(x, t, T - t0, out_ptr + start, scale_ptr, offsets, inside, INVERSE_MAX)


def block_quantize(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """x (T, C) in 1x128 blocks."""
    x = x.contiguous()
    out, scale = empty_rows(x, x.shape, FLOAT8[fmt].dtype)
    rows = row_tile(x.shape[0])
    grid = (blocks(x.shape[1]), cdiv(x.shape[0], rows))
    with on_device(x):
        _rows_kernel[grid](x, out, scale, *x.shape, inverse_max(fmt), rows, num_warps=4, **EXACT)
    return out, scale


@kernel
def _tile_kernel(
    x_ptr,  # (T, C)
    out_ptr,  # (T, C) FP8, written if PLAIN
    scale_ptr,  # (ceil(C / 128), T) FP32, if PLAIN
    out_t_ptr,  # (C, P / 2) int16: pairs of FP8
    scale_t_ptr,  # (ceil(T / 128), C) FP32
    T,
    C,
    P,
    INVERSE_MAX: tl.constexpr,
    PLAIN: tl.constexpr,
    PADDED: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    t0, c0 = block * 128, tile * 128
    t, c = 2 * tl.arange(0, 64), tl.arange(0, 128)[None, :]
    real = c < C - c0
    in0, in1 = (t < T - t0)[:, None, None] & real[None, :, :], (t + 1 < T - t0)[:, None, None] & real[None, :, :]
    offsets = t[:, None, None] * C + c[None, :, :]
    start = t0.to(tl.int64) * C + c0
    even = tl.load(x_ptr + start + offsets, mask=in0, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + start + C + offsets, mask=in1, other=0.0).to(tl.float32)
    if PLAIN:
        scale_ptr += tile.to(tl.int64) * T + t0
        store_rows(even, t, T - t0, out_ptr + start, scale_ptr, offsets, in0, INVERSE_MAX)
        store_rows(odd, t + 1, T - t0, out_ptr + start + C, scale_ptr, offsets, in1, INVERSE_MAX)
    out_t_ptr += c0.to(tl.int64) * (P // 2) + t0 // 2
    scale_t_ptr += block.to(tl.int64) * C + c0
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    store_columns(
        even, odd, in0, in1, out_t_ptr, scale_t_ptr, c, real, (P - t0) // 2, P // 2,
        PADDED, INVERSE_MAX, TYPE,
    )  # fmt: skip


def _launch_tiles(x: Tensor, fmt: str, plain: Optional[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """x (T, C) contiguous -> its transposed operand, and `plain` filled if given."""
    out_t, scale_t = empty_rows_t(x, x.shape, FLOAT8[fmt].dtype)
    out, scale = plain or (out_t, scale_t)
    padded = out_t.shape[1]
    with on_device(x):
        _tile_kernel[(blocks(x.shape[1]), token_blocks(padded))](
            x, out, scale, out_t.view(torch.int16), scale_t, *x.shape, padded,
            inverse_max(fmt), plain is not None, padded > x.shape[0], num_warps=TILE_WARPS, **EXACT,
        )  # fmt: skip
    return out_t, scale_t


def block_quantize_both(x: Tensor, fmt: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (T, C) in 1x128 blocks of its rows, and transposed in blocks along the tokens."""
    x = x.contiguous()
    plain = empty_rows(x, x.shape, FLOAT8[fmt].dtype)
    return *plain, *_launch_tiles(x, fmt, plain)


def block_quantize_t(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """x (T, C) transposed, in 1x128 blocks along the tokens."""
    return _launch_tiles(x.contiguous(), fmt, None)


# ---- kept codes -----------------------------------------------------------------------------------------------------


@kernel
def _requantize_kernel(
    codes_ptr,  # (T, C) 8-bit
    amax_ptr,  # (T, n) BF16
    weight_ptr,  # (C,), if HAS_WEIGHT
    bias_ptr,  # (C,), if HAS_BIAS
    out_t_ptr,  # (C, P / 4) int32: four E4M3 each
    scale_t_ptr,  # (ceil(T / 128), C) FP32
    T,
    C,
    P,
    n,
    INVERSE_MAX: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    PADDED: tl.constexpr,
):
    tile, block = tl.program_id(0), tl.program_id(1)
    t0, t = block * 128, 4 * tl.arange(0, 32)
    c0, c, g, real = strip_columns(tile, C, G, GP, W, V)
    codes_ptr += t0.to(tl.int64) * C + c0
    amax_ptr += t0.to(tl.int64) * n
    x0, in0 = decode_rows(codes_ptr, amax_ptr, t, c, g, real, T - t0, n, C, n, CODE)
    x1, in1 = decode_rows(codes_ptr, amax_ptr, t + 1, c, g, real, T - t0, n, C, n, CODE)
    x2, in2 = decode_rows(codes_ptr, amax_ptr, t + 2, c, g, real, T - t0, n, C, n, CODE)
    x3, in3 = decode_rows(codes_ptr, amax_ptr, t + 3, c, g, real, T - t0, n, C, n, CODE)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + c0 + c, mask=real, other=0.0).to(tl.float32)[None, :, :]
        x0, x1, x2, x3 = x0 * weight, x1 * weight, x2 * weight, x3 * weight
    if HAS_BIAS:
        bias = tl.load(bias_ptr + c0 + c, mask=real, other=0.0).to(tl.float32)[None, :, :]
        x0, x1 = tl.where(in0, x0 + bias, 0.0), tl.where(in1, x1 + bias, 0.0)
        x2, x3 = tl.where(in2, x2 + bias, 0.0), tl.where(in3, x3 + bias, 0.0)
    out_t_ptr += c0.to(tl.int64) * (P // 4) + t0 // 4
    scale_t_ptr += block.to(tl.int64) * C + c0
    inverse = store_scales(max_magnitude(quad_magnitude(x0, x1, x2, x3), 0), scale_t_ptr, c, real, INVERSE_MAX)
    quad, quads, inside = tl.arange(0, 32), (P - t0) // 4, (in0, in1, in2, in3)
    store_quads((x0, x1, x2, x3), inside, inverse, out_t_ptr, c, quad, real, quads, P // 4, PADDED, tl.float8e4nv)


def block_requantize_t(
    codes: Tensor, group_amax: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], code: str, group_size: int
) -> tuple[Tensor, Tensor]:
    """Codes (T, C) -> E4M3 of (decoded * weight + bias), transposed, in 1x128 blocks along the tokens."""
    codes, group_amax, weight, bias = dense(codes, group_amax, weight, bias)
    tokens, columns = codes.shape
    out_t, scale_t = empty_rows_t(codes, codes.shape, E4M3.dtype)
    gp, padded, strip = power_of_2(group_size), out_t.shape[1], REQUANTIZE_STRIP
    whole = gp != group_size  # whole groups then, the strip as wide as one at least
    width = max(strip.columns, gp) if whole else strip.columns
    with on_device(codes):
        _requantize_kernel[(cdiv(columns, width // gp * group_size if whole else width), token_blocks(padded))](
            codes, group_amax, codes if weight is None else weight, codes if bias is None else bias,
            out_t.view(torch.int32), scale_t, tokens, columns, padded, group_amax.shape[1],
            inverse_max("e4m3"), weight is not None, bias is not None, group_size, gp, CODES[code], width,
            strip.vector, padded > tokens, num_warps=min(strip.warps * max(width // strip.columns, 1), 32), **EXACT,
        )  # fmt: skip
    return out_t, scale_t


# ---- weights --------------------------------------------------------------------------------------------------------


@triton.jit
def _load_weights(pointers, inside, ALIGN: tl.constexpr):
    return tl.load(promise(pointers, ALIGN), mask=inside, other=0.0).to(tl.float32)


@kernel
def _weight_kernel(
    a_ptr,  # (NA, K)
    b_ptr,  # (NB, K)
    c_ptr,  # (NC, K)
    out_ptr,  # (rows, K) E4M3; or int16 pairs of E4M3 (K, rows / 2), row stride `stride`, if TRANSPOSED
    scale_ptr,  # FP32 (row blocks, K blocks), or transposed; row stride `stride_scale`
    NA,
    NB,
    NC,
    first,  # row of `out` where the first weight starts
    K,
    stride,
    stride_scale,
    INVERSE_MAX: tl.constexpr,
    ALIGN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    w_ptr, N = choose(a_ptr, b_ptr, c_ptr), choose(NA, NB, NC)
    r0, k0 = tl.program_id(0) * 128, tl.program_id(1) * 128
    row = first + choose(0, NA, NA + NB) + r0
    if r0 < N:
        r, k = 2 * tl.arange(0, 64), tl.arange(0, 128)
        real = (k < K - k0)[None, :]
        in0, in1 = (r < N - r0)[:, None] & real, (r + 1 < N - r0)[:, None] & real
        offsets = r[:, None] * K + k[None, :]
        w_ptr += r0.to(tl.int64) * K + k0
        even, odd = _load_weights(w_ptr + offsets, in0, ALIGN), _load_weights(w_ptr + K + offsets, in1, ALIGN)
        scale = scale_of(max_magnitude(max_magnitude(larger(tl.abs(even), tl.abs(odd)), 1), 0), INVERSE_MAX)
        inverse = reciprocal(scale)
        even, odd = even * inverse, odd * inverse
        if TRANSPOSED:
            tl.store(scale_ptr + tl.program_id(1) * stride_scale + row // 128, scale)
            words = tl.trans(pack_rows(even, odd, tl.float8e4nv))
            pair = tl.arange(0, 64)
            inside_t = (k < K - k0)[:, None] & (pair < (N - r0) // 2)[None, :]
            out_ptr += k0.to(tl.int64) * stride + row // 2
            tl.store(out_ptr + (k[:, None] * stride + pair[None, :]), words, mask=inside_t)
        else:
            tl.store(scale_ptr + row // 128 * stride_scale + tl.program_id(1), scale)
            out_ptr += row.to(tl.int64) * K + k0
            tl.store(promise(out_ptr + offsets, ALIGN), to_float8(even, tl.float8e4nv), mask=in0)
            tl.store(promise(out_ptr + K + offsets, ALIGN), to_float8(odd, tl.float8e4nv), mask=in1)


def block_stack_weights(weights: list[Tensor], transposed: bool) -> tuple[Tensor, Tensor]:
    """Weights (N_i, K) in 128x128 blocks, written into the slices of one buffer: (N, K) or (K, N), N = sum N_i."""
    rows, columns = sum(w.shape[0] for w in weights), weights[0].shape[1]
    if transposed and rows % 2:
        data, scale = block_stack_weights(weights, False)
        scale = F.pad(scale[:, : blocks(columns)].t(), (0, padded_blocks(rows) - blocks(rows)))
        return data.view(torch.uint8).t().contiguous().view(data.dtype), scale.contiguous()
    if any(w.shape[0] % BLOCK for w in weights[:-1]):
        weights = [torch.cat(weights)]  # a block spans two weights
    shape = (columns, rows) if transposed else (rows, columns)
    out = torch.empty(shape, dtype=E4M3.dtype, device=weights[0].device)
    scale_shape = (blocks(shape[0]), padded_blocks(shape[1]))
    filled = scale_shape[1] == blocks(shape[1])
    scale = (torch.empty if filled else torch.zeros)(scale_shape, dtype=torch.float32, device=out.device)
    target, first = (out.view(torch.int16) if transposed else out), 0
    with on_device(out):
        for part in launches(weights):
            sizes = [w.shape[0] for w in part]
            align = alignment(part) if columns % 16 == 0 else 1
            _weight_kernel[(blocks(max(sizes)), blocks(columns), len(part))](
                *three(part), target, scale, *three(sizes), first, columns, target.stride(0), scale.stride(0),
                inverse_max("e4m3"), align, transposed, num_warps=SQUARE_WARPS, **EXACT,
            )  # fmt: skip
            first += sum(sizes)
    return out, scale
