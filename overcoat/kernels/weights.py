"""Weights that share one FP8 operand (q, k, v; gate, up): with one scale, or one for each 128x128 block (blockwise.py).

Bytes moved, with N elements of 2 bytes in all: stacked copy 3N, with block scales too. Up to `PER_LAUNCH` weights are
taken by one launch: the kernels take some 10 us each, a launch of its own as much. They equal the references bit for
bit. operands.py finds the maxima, and makes several operands at once.

Legend: N rows of a weight, K its columns, L4 blocks of 128 rounded up to a multiple of 4.
"""

from __future__ import annotations

from typing import List, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.formats import E4M3, cast_float8, quantize_blocks, scale_from_amax
from overcoat.kernels.blockwise import BLOCK, blocks
from overcoat.kernels.device import (
    EXACT,
    inverse_max,
    larger,
    max_magnitude,
    pack_rows,
    scale_of,
    to_float8,
)
from overcoat.kernels.instructions import reciprocal
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import kernel
from overcoat.kernels.op import op
from overcoat.kernels.quantize import (
    alignment,
    choose,
    launch_quantize,
    launches,
    promise,
    three,
)

# Warps of a tile of 128 x 128.
SQUARE_WARPS = 8


@op
def stack_weights(weights: List[Tensor], amax: Tensor, transposed: bool) -> Tuple[Tensor, Tensor]:
    """Weights (N_i, K) as one E4M3 operand: (sum N, K), or (K, sum N) if `transposed`, and their common scale."""
    scale = scale_from_amax(amax, E4M3)
    data = cast_float8(torch.cat([w.float() for w in weights]) * (1.0 / scale), E4M3)
    return _transposed(data) if transposed else data, scale


def _transposed(data: Tensor) -> Tensor:
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def empty(weights: List[Tensor], transposed: bool = False) -> Tuple[Tensor, Tensor]:
    """Uninitialised stacked operand and scale."""
    shape = (sum([w.shape[0] for w in weights]), weights[0].shape[1])
    data = weights[0].new_empty(*(shape[::-1] if transposed else shape), dtype=E4M3.dtype)
    return data, weights[0].new_empty((), dtype=torch.float32)


@stack_weights.fake
def _(weights, amax, transposed):
    return empty(weights, transposed)


@stack_weights.cuda
def _(weights, amax, transposed):
    if transposed and any(w.shape[0] % 2 for w in weights):
        data, scale = stack_weights.kernel(weights, amax, False)
        return _transposed(data), scale
    out, scale = empty(weights, transposed)
    plain, turned = (None, out) if transposed else (out, None)
    launch_quantize(weights, amax, plain, turned, scale, "e4m3")
    return out, scale


@op
def stack_codes(codes: List[Tensor], transposed: bool) -> Tensor:
    """E4M3 codes (N_i, K) of weights that share a scale as one operand: (sum N, K), or (K, sum N) if `transposed`."""
    data = torch.cat([each.view(torch.uint8) for each in codes]).view(E4M3.dtype)
    return _transposed(data) if transposed else data


@stack_codes.fake
def _(codes, transposed):
    return empty(codes, transposed)[0]


@stack_codes.cuda
def _(codes, transposed):
    if not transposed or any(each.shape[0] % 2 for each in codes):
        return stack_codes.reference(codes, transposed)
    out, one = empty(codes, True)
    launch_quantize(codes, one.fill_(1.0), None, out, None, "e4m3")  # times 1: the same codes
    return out


def padded_blocks(size: int) -> int:
    """L4: `blocks`, rounded up to the multiple of 4 that the GEMM wants for 128x128 scales."""
    return (blocks(size) + 3) // 4 * 4


@op
def block_stack_weights(weights: List[Tensor], transposed: bool) -> Tuple[Tensor, Tensor]:
    """Weights (N_i, K) as one E4M3 operand in 128x128 blocks of the stacked matrix (N, K), N = sum N_i.

    A block may span two weights where a row count is no multiple of 128; the layouts of a weight hold the same numbers.

    Returns:
        data (N, K), scale (ceil(N / 128), L4 of K); if `transposed` data (K, N), scale (ceil(K / 128), L4 of N).
    """
    data, scale = quantize_blocks(torch.cat([w.float() for w in weights]), (BLOCK, BLOCK), E4M3)
    if transposed:
        data, scale = _transposed(data), scale.t()
    return data, F.pad(scale, (0, padded_blocks(data.shape[1]) - scale.shape[1])).contiguous()


@block_stack_weights.fake
def _empty_blocks(weights, transposed):
    """Data and scale; what is filled up of the scale is zero already."""
    first, rows, columns = weights[0], sum(w.shape[0] for w in weights), weights[0].shape[1]
    rows, columns = (columns, rows) if transposed else (rows, columns)
    make = first.new_empty if padded_blocks(columns) == blocks(columns) else first.new_zeros
    scale = make((blocks(rows), padded_blocks(columns)), dtype=torch.float32)
    return first.new_empty(rows, columns, dtype=E4M3.dtype), scale


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
    NA, NB, NC,
    first,  # row of `out` where the first weight starts
    K, stride, stride_scale, INVERSE_MAX: tl.constexpr, ALIGN: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
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


@block_stack_weights.cuda
def _(weights, transposed):
    rows, columns = sum(w.shape[0] for w in weights), weights[0].shape[1]
    if transposed and rows % 2:
        data, scale = block_stack_weights.kernel(weights, False)
        scale = F.pad(scale[:, : blocks(columns)].t(), (0, padded_blocks(rows) - blocks(rows)))
        return _transposed(data), scale.contiguous()
    if any(w.shape[0] % BLOCK for w in weights[:-1]):
        weights = [torch.cat(weights)]  # a block spans two weights
    out, scale = _empty_blocks(weights, transposed)
    target, first = (out.view(torch.int16) if transposed else out), 0
    for part in launches(weights):
        sizes = [w.shape[0] for w in part]
        align = alignment(part) if columns % 16 == 0 else 1
        _weight_kernel[(blocks(max(sizes)), blocks(columns), len(part))](
            *three(part), target, scale, *three(sizes), first, columns, target.stride(0), scale.stride(0),
            inverse_max("e4m3"), align, transposed, num_warps=SQUARE_WARPS, **EXACT,
        )  # fmt: skip
        first += sum(sizes)
    return out, scale
