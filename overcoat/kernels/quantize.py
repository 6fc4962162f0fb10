"""Quantize GEMM operands: maxima, and per-tensor FP8 in one or both layouts.

FP8 tensor cores on Hopper take both operands with the contraction axis contiguous ("NT": D = A @ B^T). The three
products of a linear layer y = x W^T (T tokens, K in, N out) therefore want:

    forward   y  = x   (T, K) . W   (N, K)^T            x, W as they lie
    dgrad     dx = dy  (T, N) . W^T (K, N)^T            W transposed
    wgrad     dW = dy^T(N, T) . x^T (K, T)^T            dy and x transposed

so a quantizing op can write the plain layout, the transposed one, or both from one read. The contraction axis must be
a multiple of 16: transposed activations are padded with zero tokens, which add nothing to the product.

The kernels are bound by memory. With N elements of 2 bytes the bytes moved are: amax 2N; quantize 3N; quantize_both 4N;
quantize_t 3N. A tile (BT tokens, BC columns) is read once, and written as it lies and / or transposed through shared
memory, as 16-bit words that hold the FP8 of two neighbouring tokens. They equal the references bit for bit.

Legend: T tokens, C columns, P = T rounded up to a multiple of 16.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.formats import FLOAT8, cast_float8, quantize_tensor
from overcoat.kernels.device import (
    EXACT,
    atomic_amax,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    pack_rows,
    scale_of,
    to_float8,
)
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, kernel, on_device
from overcoat.kernels.op import op

TOKEN_MULTIPLE = 16

# Below this many elements one program finds the maximum; above, many programs share an atomic maximum.
AMAX_BLOCK = 8192
AMAX_ONE_PROGRAM = 8 * AMAX_BLOCK
AMAX_PROGRAMS = 132 * 16

# (tokens, columns) of one program of the per-tensor kernel, without and with the transposed layout.
PLAIN_TILE, TRANSPOSED_TILE = (16, 512), (64, 128)


def padded_tokens(tokens: int) -> int:
    """P: `tokens` rounded up to what the tensor cores' contraction axis needs."""
    return (tokens + TOKEN_MULTIPLE - 1) // TOKEN_MULTIPLE * TOKEN_MULTIPLE


def transpose_padded(data: Tensor) -> Tensor:
    """(T, C) FP8 -> (C, P) contiguous, padded with zeros."""
    as_bytes = F.pad(data.view(torch.uint8), (0, 0, 0, padded_tokens(data.shape[0]) - data.shape[0]))
    return as_bytes.t().contiguous().view(data.dtype)


# ---- maximum ---------------------------------------------------------------------------------------------------------


@op
def amax(x: Tensor) -> Tensor:
    """max |x| as 0-d FP32; 0 for an empty tensor; NaN if any element is NaN."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.abs().amax().float()


@kernel
def _amax_kernel(
    x_ptr,  # N elements
    out_ptr,  # int32: bits of the FP32 maximum
    N,
    ATOMIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    top = tl.zeros((BLOCK,), tl.float32)
    offsets = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, step):
        x = tl.load(x_ptr + start + offsets, mask=offsets < N - start, other=0.0)
        top = larger(top, tl.abs(x.to(tl.float32)))
    if ATOMIC:
        atomic_amax(out_ptr, max_magnitude(top, 0))
    else:
        tl.store(out_ptr, max_magnitude(top, 0).to(tl.int32, bitcast=True))


@amax.cuda
def _(x):
    x = x.contiguous()
    one_program = x.numel() <= AMAX_ONE_PROGRAM
    programs = 1 if one_program else min(cdiv(x.numel(), AMAX_BLOCK), AMAX_PROGRAMS)
    out = (torch.empty if one_program else torch.zeros)((), dtype=torch.int32, device=x.device)
    with on_device(x):
        _amax_kernel[(programs,)](x, out, x.numel(), not one_program, AMAX_BLOCK, num_warps=8)
    return out.view(torch.float32)


# ---- per-tensor FP8 --------------------------------------------------------------------------------------------------


@op
def quantize(x: Tensor, amax: Tensor, fmt: str) -> Tuple[Tensor, Tensor]:
    """Per-tensor FP8 of x (T, C): data (T, C) and the 0-d FP32 dequantization scale for `amax`."""
    data, scale = quantize_tensor(x.contiguous(), FLOAT8[fmt], amax)
    return data, scale


@op
def quantize_both(x: Tensor, amax: Tensor, fmt: str) -> Tuple[Tensor, Tensor, Tensor]:
    """Per-tensor FP8 of x (T, C) in both layouts: data (T, C), data^T (C, P), scale."""
    data, scale = quantize_tensor(x.contiguous(), FLOAT8[fmt], amax)
    return data, transpose_padded(data), scale


@quantize_both.fake
def _(x, amax, fmt):
    dtype = FLOAT8[fmt].dtype
    tokens, columns = x.shape
    transposed = x.new_empty((columns, padded_tokens(tokens)), dtype=dtype)
    return x.new_empty(x.shape, dtype=dtype), transposed, x.new_empty((), dtype=torch.float32)


@op
def quantize_t(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """x (T, C) as transposed FP8 operand (C, P) with a scale that the forward found."""
    return transpose_padded(cast_float8(x.float() * (1.0 / scale), FLOAT8[fmt]))


@quantize_t.fake
def _(x, scale, fmt):
    return x.new_empty((x.shape[1], padded_tokens(x.shape[0])), dtype=FLOAT8[fmt].dtype)


@triton.jit
def _quantize_tile(x_ptr, out_ptr, t, c, rows, columns, stride, inverse, PLAIN: tl.constexpr):
    """Scale the rows t and columns c of a tile, of which `rows` and `columns` exist; store them if PLAIN."""
    inside = (t < rows)[:, None] & (c < columns)[None, :]
    offsets = t[:, None] * stride + c[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    # Padding stays zero even where the scale is not finite.
    x = tl.where(inside, x * inverse, 0.0)
    if PLAIN:
        tl.store(out_ptr + offsets, to_float8(x, out_ptr.dtype.element_ty), mask=inside)
    return x


@kernel
def _quantize_kernel(
    x_ptr,  # (T, C)
    factor_ptr,  # 0-d FP32: amax, or the scale itself if GIVEN_SCALE
    out_ptr,  # (T, C) FP8, written if PLAIN
    out_t_ptr,  # (C, P / 2) int16, pairs of FP8, row stride `stride_t`; if TRANSPOSED
    scale_ptr,  # 0-d FP32, unless GIVEN_SCALE
    T,
    C,
    P,
    stride_t,
    INVERSE_MAX: tl.constexpr,
    GIVEN_SCALE: tl.constexpr,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    factor = tl.load(factor_ptr)
    scale = factor if GIVEN_SCALE else scale_of(factor, INVERSE_MAX)
    if not GIVEN_SCALE:
        tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) == 0)
    inverse = inverse_of(scale)
    t0, c0 = tl.program_id(0) * BT, tl.program_id(1) * BC
    c = tl.arange(0, BC)
    x_ptr += t0.to(tl.int64) * C + c0
    out_ptr += t0.to(tl.int64) * C + c0
    if TRANSPOSED:
        pair = tl.arange(0, BT // 2)
        even = _quantize_tile(x_ptr, out_ptr, 2 * pair, c, T - t0, C - c0, C, inverse, PLAIN)
        odd = _quantize_tile(x_ptr, out_ptr, 2 * pair + 1, c, T - t0, C - c0, C, inverse, PLAIN)
        words = tl.trans(pack_rows(even, odd, out_ptr.dtype.element_ty))
        inside_t = (c < C - c0)[:, None] & (pair < (P - t0) // 2)[None, :]
        out_t_ptr += c0.to(tl.int64) * stride_t + t0 // 2
        tl.store(out_t_ptr + (c[:, None] * stride_t + pair[None, :]), words, mask=inside_t)
    else:
        _quantize_tile(x_ptr, out_ptr, tl.arange(0, BT), c, T - t0, C - c0, C, inverse, PLAIN)


def _launch_quantize(
    x: Tensor, factor: Tensor, out: Optional[Tensor], out_t: Optional[Tensor], scale: Optional[Tensor], fmt: str
) -> None:
    """x (T, C) contiguous -> out (T, C) and / or out_t (C, P), whose rows may lie apart; `scale` None: it is given."""
    rows, columns = x.shape
    padded = rows if out_t is None else out_t.shape[1]
    tile = PLAIN_TILE if out_t is None else TRANSPOSED_TILE
    grid = (cdiv(padded, tile[0]), cdiv(columns, tile[1]))
    words = x if out_t is None else out_t.view(torch.int16)
    with on_device(x):
        _quantize_kernel[grid](
            x, factor, out_t if out is None else out, words, scale if scale is not None else factor,
            rows, columns, padded, words.stride(0),
            inverse_max(fmt), scale is None, out is not None, out_t is not None, *tile, num_warps=4, **EXACT,
        )  # fmt: skip


@quantize.cuda
def _(x, amax, fmt):
    out, scale = torch.empty(x.shape, dtype=FLOAT8[fmt].dtype, device=x.device), torch.empty_like(amax)
    _launch_quantize(x.contiguous(), amax, out, None, scale, fmt)
    return out, scale


@quantize_both.cuda
def _(x, amax, fmt):
    out, scale = torch.empty(x.shape, dtype=FLOAT8[fmt].dtype, device=x.device), torch.empty_like(amax)
    out_t = torch.empty((x.shape[1], padded_tokens(x.shape[0])), dtype=out.dtype, device=x.device)
    _launch_quantize(x.contiguous(), amax, out, out_t, scale, fmt)
    return out, out_t, scale


@quantize_t.cuda
def _(x, scale, fmt):
    out_t = torch.empty((x.shape[1], padded_tokens(x.shape[0])), dtype=FLOAT8[fmt].dtype, device=x.device)
    _launch_quantize(x.contiguous(), scale, None, out_t, None, fmt)
    return out_t
