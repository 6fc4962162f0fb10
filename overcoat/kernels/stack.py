"""Weights that share one FP8 operand (q, k, v; gate, up): their common maximum, and the stacked copy.

Bytes moved, with N elements of 2 bytes in all: maximum 2N, stacked copy 3N. Up to `PER_LAUNCH` weights are taken by one
launch, the third axis of its grid telling them apart: the kernels take some 10 us each, a launch of its own as much.
They equal the references bit for bit.

Legend: N rows of a weight, K its columns.
"""

from __future__ import annotations

from typing import List, Tuple

import torch
from torch import Tensor

from overcoat.formats import E4M3, cast_float8, scale_from_amax
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

PER_LAUNCH = 3
AMAX_BLOCK, AMAX_PROGRAMS = 8192, 132 * 16
# (rows, columns) of one program, without and with the transposed layout.
PLAIN_TILE, TRANSPOSED_TILE = (16, 512), (64, 128)


@triton.jit
def promise(pointers, ALIGN: tl.constexpr):
    """Pointers (N, C), every row contiguous and starting at a multiple of ALIGN bytes.

    Triton cannot see it once a pointer was chosen among several.
    """
    return tl.multiple_of(tl.max_contiguous(pointers, (1, pointers.shape[1])), (ALIGN, ALIGN))


@triton.jit
def choose(a, b, c):
    """a, b or c by the program's index on the third axis."""
    chosen = a
    if tl.program_id(2) == 1:
        chosen = b
    if tl.program_id(2) == 2:
        chosen = c
    return chosen


# ---- which weights share a launch ------------------------------------------------------------------------------------


def launches(weights: list[Tensor]) -> list[list[Tensor]]:
    """Weights in their order, contiguous, up to three of one dtype together."""
    parts: list[list[Tensor]] = []
    for w in weights:
        if not parts or len(parts[-1]) == PER_LAUNCH or parts[-1][0].dtype != w.dtype:
            parts.append([])
        parts[-1].append(w.contiguous())
    return parts


def three(items: list) -> list:
    return items + items[:1] * (PER_LAUNCH - len(items))


def alignment(weights: list[Tensor]) -> int:
    return 16 if all(w.data_ptr() % 16 == 0 for w in weights) else 1


# ---- maximum ---------------------------------------------------------------------------------------------------------


@op
def stack_amax(weights: List[Tensor]) -> Tensor:
    """max |w| over several weights, 0-d FP32: they share one scale, being one operand of one GEMM."""
    return torch.stack([w.abs().amax().float() for w in weights]).amax()


@kernel
def _stack_amax_kernel(
    a_ptr,  # NA elements
    b_ptr,  # NB elements
    c_ptr,  # NC elements
    out_ptr,  # 0-d int32: bits of the FP32 maximum
    NA,
    NB,
    NC,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    x_ptr, N = choose(a_ptr, b_ptr, c_ptr), choose(NA, NB, NC)
    top = tl.zeros((1, BLOCK), tl.float32)
    offsets = tl.arange(0, BLOCK)[None, :]
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, tl.num_programs(0).to(tl.int64) * BLOCK):
        x = tl.load(promise(x_ptr + start + offsets, ALIGN), mask=offsets < N - start, other=0.0)
        top = larger(top, tl.abs(x.to(tl.float32)))
    atomic_amax(out_ptr, max_magnitude(max_magnitude(top, 1), 0))


@stack_amax.cuda
def _(weights):
    out = torch.zeros((), dtype=torch.int32, device=weights[0].device)
    with on_device(out):
        for part in launches(weights):
            sizes = [w.numel() for w in part]
            programs = min(cdiv(max(sizes), AMAX_BLOCK), AMAX_PROGRAMS)
            if programs:
                _stack_amax_kernel[(programs, 1, len(part))](
                    *three(part), out, *three(sizes), alignment(part), AMAX_BLOCK, num_warps=8
                )
    return out.view(torch.float32)


# ---- stacked copy ----------------------------------------------------------------------------------------------------


@op
def stack_weights(weights: List[Tensor], amax: Tensor, transposed: bool) -> Tuple[Tensor, Tensor]:
    """Weights (N_i, K) as one E4M3 operand: (sum N, K), or (K, sum N) if `transposed`, and their common scale."""
    scale = scale_from_amax(amax, E4M3)
    data = cast_float8(torch.cat([w.float() for w in weights]) * (1.0 / scale), E4M3)
    if transposed:
        data = data.view(torch.uint8).t().contiguous().view(E4M3.dtype)
    return data, scale


@stack_weights.fake
def _(weights, amax, transposed):
    rows = sum(w.shape[0] for w in weights)
    columns = weights[0].shape[1]
    shape = (columns, rows) if transposed else (rows, columns)
    return weights[0].new_empty(shape, dtype=E4M3.dtype), weights[0].new_empty((), dtype=torch.float32)


@triton.jit
def _scaled(w_ptr, n, k, rows, columns, stride, inverse, ALIGN: tl.constexpr):
    """Rows n and columns k of a tile times `inverse`, 0 beyond the `rows` and `columns` that exist; which those are."""
    inside = (n < rows)[:, None] & (k < columns)[None, :]
    pointers = promise(w_ptr + (n[:, None] * stride + k[None, :]), ALIGN)
    w = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, w * inverse, 0.0), inside


@kernel
def _stack_weights_kernel(
    a_ptr,  # (NA, K)
    b_ptr,  # (NB, K)
    c_ptr,  # (NC, K)
    amax_ptr,  # 0-d FP32
    out_ptr,  # (rows, K) FP8, or transposed (K, rows / 2) int16, pairs of FP8
    scale_ptr,  # 0-d FP32
    NA,
    NB,
    NC,
    first,  # row of `out` where the first weight starts
    K,
    stride,  # of out's rows if TRANSPOSED
    INVERSE_MAX: tl.constexpr,
    ALIGN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0)
    inverse = inverse_of(scale)
    w_ptr, N = choose(a_ptr, b_ptr, c_ptr), choose(NA, NB, NC)
    row0 = first + choose(0, NA, NA + NB)
    n0, k0 = tl.program_id(0) * BN, tl.program_id(1) * BK
    if n0 < N:
        k = tl.arange(0, BK)
        w_ptr += n0.to(tl.int64) * K + k0
        if TRANSPOSED:
            pair = tl.arange(0, BN // 2)
            even, _ = _scaled(w_ptr, 2 * pair, k, N - n0, K - k0, K, inverse, ALIGN)
            odd, _ = _scaled(w_ptr, 2 * pair + 1, k, N - n0, K - k0, K, inverse, ALIGN)
            words = tl.trans(pack_rows(even, odd, tl.float8e4nv))
            inside_t = (k < K - k0)[:, None] & (pair < (N - n0) // 2)[None, :]
            out_ptr += k0.to(tl.int64) * stride + (row0 + n0) // 2
            tl.store(out_ptr + (k[:, None] * stride + pair[None, :]), words, mask=inside_t)
        else:
            n = tl.arange(0, BN)
            w, inside = _scaled(w_ptr, n, k, N - n0, K - k0, K, inverse, ALIGN)
            out_ptr += (row0 + n0).to(tl.int64) * K + k0
            pointers = promise(out_ptr + (n[:, None] * K + k[None, :]), ALIGN)
            tl.store(pointers, to_float8(w, tl.float8e4nv), mask=inside)


@stack_weights.cuda
def _(weights, amax, transposed):
    if transposed and any(w.shape[0] % 2 for w in weights):
        data, scale = stack_weights.kernel(weights, amax, False)
        return data.view(torch.uint8).t().contiguous().view(data.dtype), scale
    rows, columns = sum(w.shape[0] for w in weights), weights[0].shape[1]
    shape = (columns, rows) if transposed else (rows, columns)
    out, scale = torch.empty(shape, dtype=E4M3.dtype, device=amax.device), torch.empty_like(amax)
    target, first = (out.view(torch.int16) if transposed else out), 0
    tile = TRANSPOSED_TILE if transposed else PLAIN_TILE
    with on_device(out):
        for part in launches(weights):
            sizes = [w.shape[0] for w in part]
            align = alignment(part) if columns % 16 == 0 else 1
            _stack_weights_kernel[(cdiv(max(sizes), tile[0]), cdiv(columns, tile[1]), len(part))](
                *three(part), amax, target, scale, *three(sizes), first, columns, target.stride(0),
                inverse_max("e4m3"), align, transposed, *tile, num_warps=4, **EXACT,
            )  # fmt: skip
            first += sum(sizes)
    return out, scale
