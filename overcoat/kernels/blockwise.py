"""FP8 operands with block scales: 1x128 activations and gradients, 128x128 weights (DeepSeek-V3, arXiv 2412.19437).

One scale per tensor lets a single outlier push everything else towards FP8's smallest values. Here 128 neighbours on
the contraction axis share a scale, so an outlier costs its own group; a weight's scale covers 128 rows as well, which
makes one quantized weight (and its transpose) serve forward and dgrad:

    forward   y  = x    (T, K) . W   (N, K)^T      x 1x128 along K      W   128x128
    dgrad     dx = dy   (T, N) . W^T (K, N)^T      dy 1x128 along N     W^T 128x128, the same scales transposed
    wgrad     dW = dy^T (N, T) . x^T (K, T)^T      both 1x128 along T

dgrad and wgrad contract over different axes, so the two layouts of a gradient are rounded with different scales.

No op waits for the maximum of a whole tensor: each reads its input once. A scale is FP32, amax / (format's maximum), 1
for a block of zeros, as in formats.py. Scales lie as the library's GEMM (gemm.py) reads them, L = ceil(K / 128) blocks
along the contraction axis, R rows of the operand:

    1x128     (L, R)
    128x128   (ceil(R / 128), L4), L4 = L rounded up to a multiple of 4, filled up with zeros

The kernels are bound by memory. With N elements of 2 bytes the bytes moved are: block_quantize and block_quantize_t 3N;
block_quantize_both 4N; block_requantize_t 2N. Each input is read once, and everything equals the references bit for
bit. What a program's tile looks like and how it is written: block_tiles.py. Weights: block_weights.py.

Legend: T tokens, C columns, P = T rounded up to a multiple of 16, G group size of kept codes, GP = G rounded up to a
power of 2, n = ceil(C / G).
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.formats import E4M3, FLOAT8, Float8, Quantized, decode_groups, quantize_blocks
from overcoat.kernels.block_tiles import (
    BLOCK,
    Strip,
    quad_magnitude,
    row_tile,
    store_columns,
    store_rows,
    store_scales,
    strip_columns,
    token_blocks,
)
from overcoat.kernels.codes import CODES
from overcoat.kernels.device import EXACT, inverse_max, max_magnitude, power_of_2
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, dense, kernel
from overcoat.kernels.op import op
from overcoat.kernels.quantize import padded_tokens
from overcoat.kernels.tiles import decode_rows, store_quads

# Warps of a tile of 128 x 128: fewer have fewer parts of a maximum to put together.
TILE_WARPS = 4
# By measurement (docs/research/kernels.md).
REQUANTIZE_STRIP = Strip(64, 4, 4, None)


def blocks(size: int) -> int:
    """How many blocks of 128 cover `size`."""
    return (size + BLOCK - 1) // BLOCK


# ---- the references, and shapes for the fakes ------------------------------------------------------------------------


def row_blocks(x: Tensor, fmt: Float8) -> Tuple[Tensor, Tensor]:
    """x (T, C) in 1x128 blocks: data (T, C), scale (ceil(C / 128), T)."""
    data, scale = quantize_blocks(x, (1, BLOCK), fmt)
    return data, scale.t().contiguous()


def row_blocks_t(x: Tensor, fmt: Float8) -> Tuple[Tensor, Tensor]:
    """x^T in 1x128 blocks along the tokens: data (C, P), padded with zeros, scale (ceil(T / 128), C)."""
    data, scale = row_blocks(x.t(), fmt)
    missing = padded_tokens(x.shape[0]) - x.shape[0]
    return F.pad(data.view(torch.uint8), (0, missing)).view(data.dtype), scale


def empty_rows(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    """Uninitialised data (T, C) = shape and scale (ceil(C / 128), T) of a 1x128 operand, on x's device."""
    rows, columns = shape
    return x.new_empty((rows, columns), dtype=dtype), x.new_empty((blocks(columns), rows), dtype=torch.float32)


def empty_rows_t(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    """Uninitialised data (C, P) and scale (ceil(T / 128), C) of the transposed operand of a tensor (T, C) = shape."""
    return empty_rows(x, (shape[1], padded_tokens(shape[0])), dtype)


# ---- activations and gradients ---------------------------------------------------------------------------------------


@op
def block_quantize(x: Tensor, fmt: str) -> Tuple[Tensor, Tensor]:
    """x (T, C) in 1x128 blocks: FP8 data (T, C), FP32 scale (ceil(C / 128), T)."""
    return row_blocks(x.contiguous(), FLOAT8[fmt])


@block_quantize.fake
def _(x, fmt):
    return empty_rows(x, x.shape, FLOAT8[fmt].dtype)


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


@block_quantize.cuda
def _(x, fmt):
    x = x.contiguous()
    out, scale = empty_rows(x, x.shape, FLOAT8[fmt].dtype)
    rows = row_tile(x.shape[0])
    grid = (blocks(x.shape[1]), cdiv(x.shape[0], rows))
    _rows_kernel[grid](x, out, scale, *x.shape, inverse_max(fmt), rows, num_warps=4, **EXACT)
    return out, scale


@op
def block_quantize_both(x: Tensor, fmt: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (T, C) in both layouts from one read: `block_quantize`, then `block_quantize_t`."""
    x = x.contiguous()
    return *row_blocks(x, FLOAT8[fmt]), *row_blocks_t(x, FLOAT8[fmt])


@block_quantize_both.fake
def _(x, fmt):
    dtype = FLOAT8[fmt].dtype
    return *empty_rows(x, x.shape, dtype), *empty_rows_t(x, x.shape, dtype)


@op
def block_quantize_t(x: Tensor, fmt: str) -> Tuple[Tensor, Tensor]:
    """x (T, C) transposed, in 1x128 blocks along the tokens: FP8 data (C, P), FP32 scale (ceil(T / 128), C)."""
    return row_blocks_t(x.contiguous(), FLOAT8[fmt])


@block_quantize_t.fake
def _(x, fmt):
    return empty_rows_t(x, x.shape, FLOAT8[fmt].dtype)


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
    _tile_kernel[(blocks(x.shape[1]), token_blocks(padded))](
        x, out, scale, out_t.view(torch.int16), scale_t, *x.shape, padded,
        inverse_max(fmt), plain is not None, padded > x.shape[0], num_warps=TILE_WARPS, **EXACT,
    )  # fmt: skip
    return out_t, scale_t


@block_quantize_both.cuda
def _(x, fmt):
    x = x.contiguous()
    plain = empty_rows(x, x.shape, FLOAT8[fmt].dtype)
    return *plain, *_launch_tiles(x, fmt, plain)


@block_quantize_t.cuda
def _(x, fmt):
    return _launch_tiles(x.contiguous(), fmt, None)


# ---- kept codes ------------------------------------------------------------------------------------------------------


@op
def block_requantize_t(
    codes: Tensor,
    group_amax: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor]:
    """Kept codes (T, C) -> decoded * weight + bias as E4M3 operand of wgrad: data (C, P), scale (ceil(T / 128), C).

    As `requantize_t`, with scales of its own: the forward's run along the other axis.
    """
    y = decode_groups(Quantized(codes, group_amax), code, group_size)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return row_blocks_t(y, E4M3)


@block_requantize_t.fake
def _(codes, group_amax, weight, bias, code, group_size):
    return empty_rows_t(codes, codes.shape, E4M3.dtype)


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


@block_requantize_t.cuda
def _(codes, group_amax, weight, bias, code, group_size):
    codes, group_amax, weight, bias = dense(codes, group_amax, weight, bias)
    tokens, columns = codes.shape
    out_t, scale_t = empty_rows_t(codes, codes.shape, E4M3.dtype)
    gp, padded, strip = power_of_2(group_size), out_t.shape[1], REQUANTIZE_STRIP
    whole = gp != group_size  # whole groups then, the strip as wide as one at least
    width = max(strip.columns, gp) if whole else strip.columns
    _requantize_kernel[(cdiv(columns, width // gp * group_size if whole else width), token_blocks(padded))](
        codes, group_amax, codes if weight is None else weight, codes if bias is None else bias,
        out_t.view(torch.int32), scale_t, tokens, columns, padded, group_amax.shape[1],
        inverse_max("e4m3"), weight is not None, bias is not None, group_size, gp, CODES[code], width,
        strip.vector, padded > tokens, num_warps=min(strip.warps * max(width // strip.columns, 1), 32), **EXACT,
    )  # fmt: skip
    return out_t, scale_t
