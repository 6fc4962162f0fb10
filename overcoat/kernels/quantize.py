"""Quantize GEMM operands: maxima, and per-tensor FP8 in one or both layouts, of one matrix or of several stacked.

FP8 tensor cores on Hopper take both operands with the contraction axis contiguous ("NT": D = A @ B^T). The three
GEMMs of a linear layer y = x W^T (T tokens, K in, N out) therefore need:

    forward   y  = x   (T, K) . W   (N, K)^T            x, W not transposed
    dgrad     dx = dy  (T, N) . W^T (K, N)^T            W transposed
    wgrad     dW = dy^T(N, T) . x^T (K, T)^T            dy and x transposed

so a quantizing op writes the plain layout, the transposed one, or both from one read. The contraction axis must be a
multiple of 16: transposed activations are padded with zero tokens, which do not change the result.

The kernels are bound by memory. With N elements of 2 bytes the bytes moved are: amax 2N; quantize 3N; quantize_both 4N;
quantize_t 3N. A tile (BT tokens, BC columns) is read once and written in one or both layouts; the transposed one goes
through shared memory as 16-bit words that hold the FP8 of two consecutive tokens. They equal the references bit for
bit. One launch takes up to `PER_LAUNCH` matrices, indexed by the third axis of its grid (weights.py).

Legend: T tokens, C columns, P = T rounded up to a multiple of 16.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.formats import FLOAT8, cast_float8, quantize_tensor, scale_from_amax
from overcoat.kernels.device import (
    EXACT,
    as_words,
    atomic_amax,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    pack_rows,
    power_of_2,
    scale_of,
    to_float8,
)
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, kernel
from overcoat.kernels.op import op

TOKEN_MULTIPLE, PER_LAUNCH = 16, 3

# Up to AMAX_ONE_PROGRAM elements one program finds the maximum; above, as many programs as an H200 holds at once update
# an atomic maximum.
AMAX_BLOCK = 8192
AMAX_ONE_PROGRAM = 8 * AMAX_BLOCK
AMAX_PROGRAMS = 132 * 8

# (tokens, columns) of one program of the per-tensor kernel, without and with the transposed layout.
PLAIN_TILE, TRANSPOSED_TILE = (16, 512), (64, 128)


def padded_tokens(tokens: int) -> int:
    """Return P: `tokens` rounded up to a multiple of 16, as the tensor cores' contraction axis needs."""
    return (tokens + TOKEN_MULTIPLE - 1) // TOKEN_MULTIPLE * TOKEN_MULTIPLE


def transpose_padded(data: Tensor) -> Tensor:
    """Transpose FP8 (T, C) to (C, P), contiguous, padded with zeros."""
    as_bytes = F.pad(data.view(torch.uint8), (0, 0, 0, padded_tokens(data.shape[0]) - data.shape[0]))
    return as_bytes.t().contiguous().view(data.dtype)


def empty_both(x: Tensor, fmt: str, columns: Optional[int] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """Allocate FP8 (T, C) and (C, P) on x's device, T = len(x), C its columns unless given; and a 0-d FP32 scale."""
    columns = x.shape[1] if columns is None else columns
    data = x.new_empty(x.shape[0], columns, dtype=FLOAT8[fmt].dtype)
    transposed = x.new_empty(columns, padded_tokens(x.shape[0]), dtype=data.dtype)
    return data, transposed, x.new_empty((), dtype=torch.float32)


# ---- several matrices in a launch ------------------------------------------------------------------------------------


@triton.jit
def promise(pointers, ALIGN: tl.constexpr):
    """Tell Triton that each row of pointers (N, C) is contiguous and starts at a multiple of ALIGN bytes.

    Triton cannot see this of a pointer that was chosen among several.
    """
    return tl.multiple_of(tl.max_contiguous(pointers, (1, pointers.shape[1])), (ALIGN, ALIGN))


@triton.jit
def choose(a, b, c, COUNT: tl.constexpr = 3):
    """Return a, b or c, by the program's index on the grid's third axis, which is COUNT long."""
    chosen = a
    if COUNT > 1:
        if tl.program_id(2) == 1:
            chosen = b
        if tl.program_id(2) == 2:
            chosen = c
    return chosen


def launches(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split weights, in order and made contiguous, into lists of up to three of one dtype."""
    if len(weights) == 1:
        return [[weights[0].contiguous()]]
    parts: list[list[Tensor]] = []
    for w in weights:
        if not parts or len(parts[-1]) == PER_LAUNCH or parts[-1][0].dtype != w.dtype:
            parts.append([])
        parts[-1].append(w.contiguous())
    return parts


def three(items: list, rest: Optional[int] = None) -> list:
    """Pad a list to three items with `rest`, or if that is None with the first item."""
    return items + [items[0] if rest is None else rest] * (PER_LAUNCH - len(items))


def alignment(weights: list[Tensor], columns: int = 16) -> int:
    """Return the alignment of each row's address in bytes, up to the largest that matters."""
    for w in weights:
        columns |= w.data_ptr()
    return 1 if columns & 15 else 16


# ---- maximum ---------------------------------------------------------------------------------------------------------


@op
def amax(x: Tensor) -> Tensor:
    """Return max |x| as 0-d FP32; 0 for an empty tensor; NaN if any element is NaN."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return x.abs().amax().float()


@kernel
def _amax_kernel(
    a_ptr,  # NA elements
    b_ptr,  # NB elements
    c_ptr,  # NC elements
    out_ptr,  # 0-d FP32: the maximum
    NA, NB, NC, ALIGN: tl.constexpr, COUNT: tl.constexpr, ATOMIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    x_ptr, N = choose(a_ptr, b_ptr, c_ptr, COUNT), choose(NA, NB, NC, COUNT)
    top = tl.zeros((1, BLOCK), tl.float32)
    offsets = tl.arange(0, BLOCK)[None, :]
    count = tl.cdiv(N, BLOCK)
    for block in range(tl.program_id(0), count, tl.num_programs(0)):
        # From the end to the start: the quantization that follows begins at the start, then still in the L2 cache.
        start = (count - 1 - block).to(tl.int64) * BLOCK
        x = tl.load(promise(x_ptr + start + offsets, ALIGN), mask=offsets < N - start, other=0.0)
        top = larger(top, tl.abs(x.to(tl.float32)))
    found = max_magnitude(max_magnitude(top, 1), 0)
    if ATOMIC:
        atomic_amax(out_ptr, found)
    else:
        tl.store(out_ptr, found)


def launch_amax(tensors: Sequence[Tensor]) -> Tensor:
    """Return max |x| over all tensors, 0-d FP32."""
    one_program = len(tensors) == 1 and tensors[0].numel() <= AMAX_ONE_PROGRAM
    out = (tensors[0].new_empty if one_program else tensors[0].new_zeros)((), dtype=torch.float32)
    for part in launches(tensors[::-1]):
        sizes = [x.numel() for x in part]
        programs = 1 if one_program else min(cdiv(max(sizes), AMAX_BLOCK), AMAX_PROGRAMS)
        if programs:
            _amax_kernel[(programs, 1, len(part))](
                *three(part), out, *three(sizes, 0), alignment(part), len(part), not one_program, AMAX_BLOCK,
                num_warps=8,
            )  # fmt: skip
    return out


@amax.cuda
def _(x):
    return launch_amax([x])


# ---- per-tensor FP8 --------------------------------------------------------------------------------------------------


@op
def quantize(x: Tensor, amax: Tensor, fmt: str) -> Tuple[Tensor, Tensor]:
    """Quantize x (T, C) with one scale: data (T, C) and the 0-d FP32 dequantization scale for `amax` (0-d)."""
    data, scale = quantize_tensor(x.contiguous(), FLOAT8[fmt], amax)
    return data, scale


@quantize.fake
def _(x, amax, fmt):
    return x.new_empty(x.shape, dtype=FLOAT8[fmt].dtype), torch.empty_like(amax)


@op
def quantize_both(x: Tensor, amax: Tensor, fmt: str) -> Tuple[Tensor, Tensor, Tensor]:
    """Quantize x (T, C) with one scale in both layouts: data (T, C), data^T (C, P), scale (0-d FP32)."""
    data, scale = quantize.reference(x, amax, fmt)
    return data, transpose_padded(data), scale


@quantize_both.fake
def _(x, amax, fmt):
    return empty_both(x, fmt)


@op
def quantize_t(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """Return x (T, C) as transposed FP8 operand (C, P), with the forward's scale (0-d FP32)."""
    return transpose_padded(cast_float8(x.float() * (1.0 / scale), FLOAT8[fmt]))


@quantize_t.fake
def _(x, scale, fmt):
    return empty_both(x, fmt)[1]


@triton.jit
def quantize_tile(
    x_ptr, out_ptr, t, c, rows, columns, stride, inverse, PLAIN: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Return x and x * inverse at rows t, columns c, of which `rows` and `columns` exist; PLAIN: store the latter."""
    inside = (t < rows)[:, None] & (c < columns)[None, :]
    offsets = t[:, None] * stride + c[None, :]
    x = tl.load(promise(x_ptr + offsets, ALIGN), mask=inside, other=0.0).to(tl.float32)
    # Padding stays zero even where the scale is not finite.
    scaled = tl.where(inside, x * inverse, 0.0)
    if PLAIN:
        tl.store(promise(out_ptr + offsets, ALIGN), to_float8(scaled, out_ptr.dtype.element_ty), mask=inside)
    return x, scaled


@kernel
def _quantize_kernel(
    a_ptr,  # (T, C)
    b_ptr,  # (NB, C)
    c_ptr,  # (NC, C)
    factor_ptr,  # 0-d FP32: amax, or the scale itself if GIVEN_SCALE
    out_ptr,  # (rows, C) FP8, written if PLAIN
    out_t_ptr,  # (C, rows) FP8, row stride 2 `stride_t`; if TRANSPOSED
    scale_ptr,  # 0-d FP32, unless GIVEN_SCALE
    T, NB, NC, C,
    P,  # of the first; several matrices are not padded
    stride_t, INVERSE_MAX: tl.constexpr, ALIGN: tl.constexpr, COUNT: tl.constexpr, GIVEN_SCALE: tl.constexpr,
    PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    factor = tl.load(factor_ptr)
    scale = factor if GIVEN_SCALE else scale_of(factor, INVERSE_MAX)
    if not GIVEN_SCALE:
        tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0)
    inverse = inverse_of(scale)
    x_ptr, padded, row0 = choose(a_ptr, b_ptr, c_ptr, COUNT), choose(P, NB, NC, COUNT), choose(0, P, P + NB, COUNT)
    rows = T if COUNT == 1 else padded
    t0, c0 = tl.program_id(0) * BT, tl.program_id(1) * BC
    if not TRANSPOSED:  # rows after rows
        across = tl.cdiv(C, BC)
        t0, c0 = tl.program_id(0) // across * BT, tl.program_id(0) % across * BC
    if COUNT == 1 or t0 < padded:
        c = tl.arange(0, BC)
        x_ptr += t0.to(tl.int64) * C + c0
        out_ptr += (row0 + t0).to(tl.int64) * C + c0
        if TRANSPOSED:
            pair = tl.arange(0, BT // 2)
            _, even = quantize_tile(x_ptr, out_ptr, 2 * pair, c, rows - t0, C - c0, C, inverse, PLAIN, ALIGN)
            _, odd = quantize_tile(x_ptr, out_ptr, 2 * pair + 1, c, rows - t0, C - c0, C, inverse, PLAIN, ALIGN)
            words = tl.trans(pack_rows(even, odd, out_ptr.dtype.element_ty))
            inside_t = (c < C - c0)[:, None] & (pair < (padded - t0) // 2)[None, :]
            target = as_words(out_t_ptr, 16) + (c0.to(tl.int64) * stride_t + (row0 + t0) // 2)
            tl.store(target + (c[:, None] * stride_t + pair[None, :]), words, mask=inside_t)
        else:
            quantize_tile(x_ptr, out_ptr, tl.arange(0, BT), c, rows - t0, C - c0, C, inverse, PLAIN, ALIGN)


def launch_quantize(
    tensors: Sequence[Tensor], factor: Tensor, out: Optional[Tensor], out_t: Optional[Tensor], scale: Optional[Tensor],
    fmt: str,
) -> None:  # fmt: skip
    """Quantize matrices (T_i, C) into out (sum T_i, C) and / or out_t (C, P or sum T_i).

    factor: 0-d, amax; or if `scale` is None, the scale itself.
    """
    columns, first = tensors[0].shape[1], 0
    tile = PLAIN_TILE if out_t is None else TRANSPOSED_TILE
    for part in launches(tensors):
        sizes = [x.shape[0] for x in part]
        padded = out_t.shape[1] if out_t is not None and len(tensors) == 1 else sizes[0]
        plain, turned = out, out_t
        if first:
            plain = None if out is None else out[first:]
            turned = None if out_t is None else out_t[:, first:]
        down, across = cdiv(max(padded, *sizes), tile[0]), cdiv(columns, tile[1])
        _quantize_kernel[(down * across, 1, len(part)) if out_t is None else (down, across, len(part))](
            *three(part), factor, turned if plain is None else plain, plain if turned is None else turned,
            factor if scale is None else scale, *three(sizes, 0), columns, padded,
            0 if turned is None else turned.stride(0) // 2, inverse_max(fmt), alignment(part, columns), len(part),
            scale is None, out is not None, out_t is not None, *tile, num_warps=4, **EXACT,
        )  # fmt: skip
        first += sum(sizes)


@quantize.cuda
def _(x, amax, fmt):
    out, scale = x.new_empty(*x.shape, dtype=FLOAT8[fmt].dtype), torch.empty_like(amax)
    launch_quantize([x], amax, out, None, scale, fmt)
    return out, scale


@quantize_both.cuda
def _(x, amax, fmt):
    out, out_t, scale = empty_both(x, fmt)
    launch_quantize([x], amax, out, out_t, scale, fmt)
    return out, out_t, scale


@quantize_t.cuda
def _(x, scale, fmt):
    out_t = x.new_empty(x.shape[1], padded_tokens(x.shape[0]), dtype=FLOAT8[fmt].dtype)
    launch_quantize([x], scale, None, out_t, None, fmt)
    return out_t


# ---- FP8 with a scale for each row -----------------------------------------------------------------------------------


@op
def quantize_rows(x: Tensor, fmt: str) -> Tuple[Tensor, Tensor]:
    """Quantize x (T, C) with one scale for each row: data (T, C) and scales (T,) FP32."""
    scale = scale_from_amax(x.abs().amax(1), FLOAT8[fmt])
    return cast_float8(x.contiguous().float() * (1.0 / scale)[:, None], FLOAT8[fmt]), scale


@quantize_rows.fake
def _(x, fmt):
    return x.new_empty(x.shape, dtype=FLOAT8[fmt].dtype), x.new_empty(x.shape[0], dtype=torch.float32)


@kernel
def _quantize_rows_kernel(
    x_ptr,  # (T, C)
    out_ptr,  # (T, C) FP8
    scale_ptr,  # (T,) FP32
    C, INVERSE_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * C
    top = tl.zeros((1, BLOCK), tl.float32)
    c = tl.arange(0, BLOCK)[None, :]
    for c0 in range(0, C, BLOCK):
        top = larger(top, tl.abs(tl.load(x_ptr + c0 + c, mask=c < C - c0, other=0.0).to(tl.float32)))
    scale = scale_of(max_magnitude(max_magnitude(top, 1), 0), INVERSE_MAX)
    tl.store(scale_ptr + row, scale)
    inverse = inverse_of(scale)
    for c0 in range(0, C, BLOCK):
        x = tl.load(x_ptr + c0 + c, mask=c < C - c0, other=0.0).to(tl.float32) * inverse
        tl.store(out_ptr + row * C + c0 + c, to_float8(x, out_ptr.dtype.element_ty), mask=c < C - c0)


@quantize_rows.cuda
def _(x, fmt):
    x = x.contiguous()
    out, scale = x.new_empty(x.shape, dtype=FLOAT8[fmt].dtype), x.new_empty(x.shape[0], dtype=torch.float32)
    if x.numel():
        block = min(power_of_2(x.shape[1]), 4096)
        _quantize_rows_kernel[(x.shape[0],)](x, out, scale, x.shape[1], inverse_max(fmt), block, num_warps=4, **EXACT)
    return out, scale
