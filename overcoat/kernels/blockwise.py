"""FP8 operands with block scales: 1x128 activations and gradients, 128x128 weights (DeepSeek-V3, arXiv 2412.19437).

With one scale per tensor a single outlier pushes all other values towards FP8's smallest. Here 128 consecutive values
on the contraction axis share a scale, so an outlier affects only its own group. A weight's scale also covers 128 rows,
so one quantized weight and its transpose serve forward and dgrad:

    forward   y  = x    (T, K) . W   (N, K)^T      x 1x128 along K      W   128x128
    dgrad     dx = dy   (T, N) . W^T (K, N)^T      dy 1x128 along N     W^T 128x128, the same scales transposed
    wgrad     dW = dy^T (N, T) . x^T (K, T)^T      both 1x128 along T

dgrad and wgrad contract over different axes, so the two layouts of a gradient are rounded with different scales.

No op needs the maximum of a whole tensor, so each reads its input once. A scale is FP32, amax / (format's maximum), 1
for a block of zeros, as in formats/float8.py. Scales have the layout of cuBLAS (gemm.py), L = ceil(K / 128) blocks
along the contraction axis, R rows of the operand:

    1x128     (L, R)
    128x128   (ceil(R / 128), L4), L4 = L rounded up to a multiple of 4, padded with zeros

The kernels are bound by memory. With N elements of 2 bytes the bytes moved are: block_quantize and block_quantize_t 3N;
block_quantize_both 4N; requantize_t and block_requantize_t 2N. All results equal the references bit for bit. One
kernel does all transposed writes: of values and of saved codes, with block scales and with one scale per tensor.
Weights: weights.py.

Legend: T tokens, C columns, P = T rounded up to a multiple of 16, G group size of saved codes, GP = G rounded up to a
power of 2, n = ceil(C / G).

A tile's 128 columns and / or 128 tokens are whole blocks, so a program finds its blocks' maxima in registers. A tile is
(tokens, NG, GP): its columns are NG groups of saved codes, or one group of 128. Transposed results are stored as 32-bit
words of four consecutive tokens (tiles.py), so the tile is held as four tiles.

To reduce along tokens, threads exchange one number per column that they hold, and warps do the same through shared
memory, where columns that are 32 or more numbers apart share a bank. With Triton's default of 16 bytes of a row per
thread and 8 warps, these conflicts kept shared memory 62 to 92% busy (Nsight Compute). So a `Strip` sets how many
columns a thread holds, uses few warps, and takes all maxima in one reduction.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.formats import E4M3, FLOAT8, Float8, Quantized, cast_float8, decode_groups, quantize_blocks
from overcoat.kernels.codes import CODES
from overcoat.kernels.device import (
    EXACT,
    TRITON_FLOAT8,
    as_words,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    power_of_2,
    scale_of,
    to_float8,
)
from overcoat.kernels.instructions import reciprocal
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense, kernel
from overcoat.kernels.op import op
from overcoat.kernels.quantize import padded_tokens, transpose_padded
from overcoat.kernels.tiles import decode_rows, group_columns, store_quads

BLOCK = 128
# Tokens of a tile in which only rows get scales.
ROW_TILE = 16


class Strip(NamedTuple):
    """A tile of 128 tokens in which columns get scales."""

    columns: int
    vector: int  # consecutive columns of a thread
    warps: int
    registers: Optional[int]  # limit per thread; None: the compiler decides


# CUDA's limit for the second axis of a grid, which counts token blocks. A one-axis grid took up to 12% longer.
MOST_BLOCKS = 65535


def token_blocks(tokens: int) -> int:
    """Return how many blocks of 128 cover the tokens. ValueError: more blocks than a grid allows."""
    count = cdiv(tokens, BLOCK)
    if count > MOST_BLOCKS:
        raise ValueError(f"{tokens} tokens at once are more than {MOST_BLOCKS * BLOCK}: split the batch")
    return count


def row_tile(tokens: int) -> int:
    """Return the tokens of a program in which only rows get scales: 16, or a larger power of 2 if the grid needs it.

    ValueError: more tokens than `token_blocks` takes.
    """
    return max(ROW_TILE, power_of_2(cdiv(token_blocks(tokens) * BLOCK, MOST_BLOCKS)))


@triton.jit
def store_rows(x, t, rows, out_ptr, scale_ptr, offsets, inside, INVERSE_MAX: tl.constexpr):
    """Store rows t of x (BT, NG, GP), zero outside, one block each: x / scale in FP8 at `offsets`, and the scales."""
    scale = scale_of(max_magnitude(max_magnitude(x, 2), 1), INVERSE_MAX)
    tl.store(scale_ptr + t, scale, mask=t < rows)
    x = x * reciprocal(scale)[:, None, None]
    tl.store(out_ptr + offsets, to_float8(x, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def strip_columns(number, C, G: tl.constexpr, GP: tl.constexpr, W: tl.constexpr, V: tl.constexpr):
    """Return strip `number`'s first column c0; its columns (NG, WG) relative to c0; their groups (NG,); which exist.

    A strip of W columns is part of one group or several groups. If G is no power of 2 its groups are whole, of GP
    columns each.
    """
    if G == GP:
        NG: tl.constexpr = (W + G - 1) // G
        WG: tl.constexpr = W // NG
        first, c0, i = tl.arange(0, NG) * WG, number * W, tl.arange(0, WG)
        # Written so that the compiler sees only V consecutive columns, not all.
        c = first[:, None] + (i // V * V + i % V)[None, :]
        return c0, c, (c0 + first) // G, c < C - c0
    else:
        g0 = number * (W // GP)
        g, c, real = group_columns(g0, C, G, GP, W // GP)
        return g0 * G, c, g0 + g, real


@triton.jit
def quad_magnitude(x0, x1, x2, x3):
    """Return the largest |x| of four rows, element by element."""
    return larger(larger(tl.abs(x0), tl.abs(x1)), larger(tl.abs(x2), tl.abs(x3)))


@triton.jit
def store_scales(amax, scale_t_ptr, c, real, INVERSE_MAX: tl.constexpr):
    """Store the columns' scales (NG, GP), from their maxima; return the reciprocals (1, NG, GP)."""
    scale = scale_of(amax, INVERSE_MAX)
    tl.store(scale_t_ptr + c, scale, mask=real)
    return reciprocal(scale)[None, :, :]


@triton.jit
def store_values(x, inside, pointers, stride):
    """Store rows t to t + 3 unscaled, in the pointers' type."""
    TYPE: tl.constexpr = pointers.dtype.element_ty
    tl.store(pointers, x[0].to(TYPE), mask=inside[0])
    tl.store(pointers + stride, x[1].to(TYPE), mask=inside[1])
    tl.store(pointers + 2 * stride, x[2].to(TYPE), mask=inside[2])
    tl.store(pointers + 3 * stride, x[3].to(TYPE), mask=inside[3])


# Measured (docs/research/kernels.md). A strip that is also stored untransposed must be one block (128) wide.
REQUANTIZE_STRIP, VALUES_STRIP = Strip(64, 4, 4, None), Strip(128, 8, 4, None)
# With one scale per tensor, tiles of 64 tokens.
TENSOR_STRIP, TENSOR_TOKENS = Strip(128, 16, 4, None), 64


def blocks(size: int) -> int:
    """Return how many blocks of 128 cover `size`."""
    return (size + BLOCK - 1) // BLOCK


# ---- the references, and shapes for the fakes ------------------------------------------------------------------------


def row_blocks(x: Tensor, fmt: Float8) -> Tuple[Tensor, Tensor]:
    """Quantize x (T, C) in 1x128 blocks: data (T, C), scale (ceil(C / 128), T)."""
    data, scale = quantize_blocks(x, (1, BLOCK), fmt)
    return data, scale.t().contiguous()


def row_blocks_t(x: Tensor, fmt: Float8) -> Tuple[Tensor, Tensor]:
    """Quantize x^T in 1x128 blocks along the tokens: data (C, P), padded with zeros, scale (ceil(T / 128), C)."""
    data, scale = row_blocks(x.t(), fmt)
    missing = padded_tokens(x.shape[0]) - x.shape[0]
    return F.pad(data.view(torch.uint8), (0, missing)).view(data.dtype), scale


def empty_rows(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    """Allocate data (T, C) = shape and scale (ceil(C / 128), T) of a 1x128 operand, on x's device."""
    rows, columns = shape
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty(blocks(columns), rows, dtype=torch.float32)


def empty_rows_t(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    """Allocate data (C, P) and scale (ceil(T / 128), C) of the transposed operand of a tensor (T, C) = shape."""
    return empty_rows(x, (shape[1], padded_tokens(shape[0])), dtype)


# ---- activations and gradients ---------------------------------------------------------------------------------------


@op
def block_quantize(x: Tensor, fmt: str) -> Tuple[Tensor, Tensor]:
    """Quantize x (T, C) in 1x128 blocks: FP8 data (T, C), FP32 scale (ceil(C / 128), T)."""
    return row_blocks(x.contiguous(), FLOAT8[fmt])


@block_quantize.fake
def _(x, fmt):
    return empty_rows(x, x.shape, FLOAT8[fmt].dtype)


@kernel
def _rows_kernel(
    x_ptr,  # (T, C)
    out_ptr,  # (T, C) FP8
    scale_ptr,  # (ceil(C / 128), T) FP32
    T, C, INVERSE_MAX: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
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
    """Return the results of `block_quantize`, then of `block_quantize_t`, from one read of x (T, C)."""
    x = x.contiguous()
    return *row_blocks(x, FLOAT8[fmt]), *row_blocks_t(x, FLOAT8[fmt])


@block_quantize_both.fake
def _(x, fmt):
    dtype = FLOAT8[fmt].dtype
    return *empty_rows(x, x.shape, dtype), *empty_rows_t(x, x.shape, dtype)


@op
def block_quantize_t(x: Tensor, fmt: str) -> Tuple[Tensor, Tensor]:
    """Quantize x (T, C) transposed, in 1x128 blocks along tokens: FP8 data (C, P), FP32 scale (ceil(T / 128), C)."""
    return row_blocks_t(x.contiguous(), FLOAT8[fmt])


@block_quantize_t.fake
def _(x, fmt):
    return empty_rows_t(x, x.shape, FLOAT8[fmt].dtype)


@block_quantize_both.cuda
def _(x, fmt):
    x = x.contiguous()
    plain = empty_rows(x, x.shape, FLOAT8[fmt].dtype)
    return *plain, *_launch_transposed(x, fmt, VALUES_STRIP, plain=plain)


@block_quantize_t.cuda
def _(x, fmt):
    return _launch_transposed(x.contiguous(), fmt, VALUES_STRIP)


# ---- saved codes: a weight gradient's operand ------------------------------------------------------------------------


@op
def requantize_t(
    codes: Tensor, group_amax: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], scale: Tensor, code: str,
    group_size: int,
) -> Tensor:  # fmt: skip
    """Return (decoded codes (T, C)) * weight + bias as transposed E4M3 operand (C, P), with the forward's scale (0-d).

    With a norm's weight and bias (C,) this recomputes the norm's output from its saved normalised input, so that the
    forward's FP8 operand need not be saved. Without them it serves layers that read the residual stream itself.
    """
    y = _decoded(codes, group_amax, weight, bias, code, group_size)
    return transpose_padded(cast_float8(y * (1.0 / scale), E4M3))


@op
def block_requantize_t(
    codes: Tensor, group_amax: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], code: str, group_size: int
) -> Tuple[Tensor, Tensor]:
    """Return the same with new scales in 1x128 blocks along the tokens: data (C, P), scale (ceil(T / 128), C)."""
    return row_blocks_t(_decoded(codes, group_amax, weight, bias, code, group_size), E4M3)


def _decoded(
    codes: Tensor, group_amax: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], code: str, group_size: int
) -> Tensor:
    y = decode_groups(Quantized(codes, group_amax), code, group_size)
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float()


@requantize_t.fake
def _(codes, group_amax, weight, bias, scale, code, group_size):
    return empty_rows_t(codes, codes.shape, E4M3.dtype)[0]


@block_requantize_t.fake
def _(codes, group_amax, weight, bias, code, group_size):
    return empty_rows_t(codes, codes.shape, E4M3.dtype)


@requantize_t.cuda
def _(codes, group_amax, weight, bias, scale, code, group_size):
    codes, *kept = dense(codes, group_amax, weight, bias)
    return _launch_transposed(codes, "e4m3", TENSOR_STRIP, kept, CODES[code], group_size, scale)[0]


@block_requantize_t.cuda
def _(codes, group_amax, weight, bias, code, group_size):
    codes, *kept = dense(codes, group_amax, weight, bias)
    return _launch_transposed(codes, "e4m3", REQUANTIZE_STRIP, kept, CODES[code], group_size)


# ---- the kernel that transposes --------------------------------------------------------------------------------------


@triton.jit
def _load_row(x_ptr, amax_ptr, t, c, g, real, rows, groups, C, n, CODE: tl.constexpr):
    """Load rows t of a tile (BT / 4, NG, GP), decoded unless CODE is None; return them and which are inside."""
    if CODE is not None:
        return decode_rows(x_ptr, amax_ptr, t, c, g, real, rows, groups, C, n, CODE)
    else:
        inside = (t < rows)[:, None, None] & real[None, :, :]
        return tl.load(x_ptr + (t[:, None, None] * C + c[None, :, :]), mask=inside, other=0.0).to(tl.float32), inside


@kernel
def _transpose_kernel(
    x_ptr,  # (T, C); 8-bit codes unless CODE is None
    amax_ptr,  # (T, n) BF16, of codes
    weight_ptr,  # (C,), if HAS_WEIGHT
    bias_ptr,  # (C,), if HAS_BIAS
    out_ptr,  # (T, C) FP8, if PLAIN
    scale_ptr,  # (ceil(C / 128), T) FP32, if PLAIN
    out_t_ptr,  # (C, P) FP8, of which four are stored together
    scale_t_ptr,  # (ceil(T / 128), C) FP32, written; 0-d and given, unless BLOCKS
    T, C, P, n,
    TYPE: tl.constexpr, INVERSE_MAX: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCKS: tl.constexpr, PLAIN: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, CODE: tl.constexpr,
    BT: tl.constexpr, W: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(1 if BLOCKS else 0), tl.program_id(0 if BLOCKS else 1)
    t0, quad = block * BT, tl.arange(0, BT // 4)
    if BLOCKS:
        g0 = 0
        c0, c, g, real = strip_columns(tile, C, G, GP, W, V)
    else:
        g0 = tile * (W // GP)
        g, c, real = group_columns(g0, C, G, GP, W // GP)
        c0 = g0 * G
    start, t, rows = t0.to(tl.int64) * C + c0, 4 * quad, T - t0
    x_ptr += start
    amax_ptr += t0.to(tl.int64) * n + g0
    x0, in0 = _load_row(x_ptr, amax_ptr, t, c, g, real, rows, n - g0, C, n, CODE)
    x1, in1 = _load_row(x_ptr, amax_ptr, t + 1, c, g, real, rows, n - g0, C, n, CODE)
    x2, in2 = _load_row(x_ptr, amax_ptr, t + 2, c, g, real, rows, n - g0, C, n, CODE)
    x3, in3 = _load_row(x_ptr, amax_ptr, t + 3, c, g, real, rows, n - g0, C, n, CODE)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + c0 + c, mask=real, other=0.0).to(tl.float32)[None, :, :]
        x0, x1, x2, x3 = x0 * weight, x1 * weight, x2 * weight, x3 * weight
    if HAS_BIAS:
        bias = tl.load(bias_ptr + c0 + c, mask=real, other=0.0).to(tl.float32)[None, :, :]
        x0, x1 = tl.where(in0, x0 + bias, 0.0), tl.where(in1, x1 + bias, 0.0)
        x2, x3 = tl.where(in2, x2 + bias, 0.0), tl.where(in3, x3 + bias, 0.0)
    if PLAIN:
        out_ptr += start
        scale_ptr += tile.to(tl.int64) * T + t0
        offsets = t[:, None, None] * C + c[None, :, :]
        store_rows(x0, t, rows, out_ptr, scale_ptr, offsets, in0, INVERSE_MAX)
        store_rows(x1, t + 1, rows, out_ptr + C, scale_ptr, offsets, in1, INVERSE_MAX)
        store_rows(x2, t + 2, rows, out_ptr + 2 * C, scale_ptr, offsets, in2, INVERSE_MAX)
        store_rows(x3, t + 3, rows, out_ptr + 3 * C, scale_ptr, offsets, in3, INVERSE_MAX)
    if BLOCKS:
        scale_t_ptr += block.to(tl.int64) * C + c0
        inverse = store_scales(max_magnitude(quad_magnitude(x0, x1, x2, x3), 0), scale_t_ptr, c, real, INVERSE_MAX)
    else:
        inverse = inverse_of(tl.load(scale_t_ptr))
    quads, inside = (P - t0) // 4, (in0, in1, in2, in3)
    out_t_ptr = as_words(out_t_ptr, 32) + (c0.to(tl.int64) * (P // 4) + t0 // 4)
    store_quads((x0, x1, x2, x3), inside, inverse, out_t_ptr, c, quad, real, quads, P // 4, PADDED, TYPE)


def _launch_transposed(
    x: Tensor, fmt: str, strip: Strip, kept: Sequence[Any] = (None, None, None), code: Optional[int] = None,
    group_size: int = BLOCK, given: Optional[Tensor] = None, plain: Optional[tuple[Tensor, Tensor]] = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernel on x (T, C), contiguous values or codes; return the transposed operand.

    kept: maxima, weight and bias. given: the scale, if there is one per tensor. plain: outputs in x's own layout, which
    are filled too.
    """
    (tokens, columns), gp, is_blocks = x.shape, power_of_2(group_size), given is None
    out_t, scale_t = empty_rows_t(x, x.shape, FLOAT8[fmt].dtype)
    padded, scale_t, rows = out_t.shape[1], scale_t if given is None else given, BLOCK if is_blocks else TENSOR_TOKENS
    # A strip may be part of a group only if groups are powers of 2.
    width = strip.columns if is_blocks and gp == group_size else max(strip.columns, gp)
    across = cdiv(columns, width if gp == group_size else width // gp * group_size)
    _transpose_kernel[(across, token_blocks(padded)) if is_blocks else (cdiv(padded, rows), across)](
        x, *[x if each is None else each for each in kept], *(plain or (out_t, scale_t)), out_t,
        scale_t, tokens, columns, padded, cdiv(columns, group_size), TRITON_FLOAT8[fmt], inverse_max(fmt),
        kept[1] is not None, kept[2] is not None, is_blocks, plain is not None, group_size, gp, code, rows, width,
        strip.vector, padded > tokens, num_warps=min(strip.warps * max(width // strip.columns, 1), 32), **EXACT,
    )  # fmt: skip
    return out_t, scale_t
