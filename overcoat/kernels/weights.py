"""Weights as E4M3 operands: stacked (q, k, v; gate, up), with one scale, or one for each 128x128 block (blockwise.py).

    stack_weights, block_stack_weights    one operand, plain or transposed; 3N bytes moved for N elements
    quantize_parameters                   finds the maxima and quantizes several operands in the same launches
    stack_operands                        several operands, plain or transposed, from given maxima

A launch takes the GPU 4 us and the host 12, even for small weights. A block has four operands (q, k, v; the output
layer; gate, up; down). Each needs a maximum and a copy in the forward and a transposed copy in the backward: 12
launches, and 4 that zero the maxima. Shared launches make that 4. One launch takes up to `WEIGHTS` weights.

A parameter's maximum rarely changes between calls. So the copy is made with the previous maximum while the true one is
found (3 bytes moved per 2-byte element; finding the maximum first would move 5, less L2 hits). Where they differ the
copy is made again, so no result depends on the previous value. All equal the references bit for bit.

Legend: N rows of a weight, K its columns, L4 blocks of 128 rounded up to a multiple of 4.
"""

from __future__ import annotations

import functools
import operator
import weakref
from typing import Any, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, bfloat16
from torch.nn import Parameter

from overcoat.formats import E4M3, quantize_blocks, quantize_tensor
from overcoat.kernels.blockwise import BLOCK, blocks
from overcoat.kernels.device import (
    EXACT,
    as_words,
    atomic_amax,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    pack_rows,
    scale_of,
    to_float8,
)
from overcoat.kernels.instructions import reciprocal
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, kernel
from overcoat.kernels.op import op
from overcoat.kernels.quantize import (
    AMAX_PROGRAMS,
    PLAIN_TILE,
    TRANSPOSED_TILE,
    alignment,
    choose,
    launch_amax,
    launch_quantize,
    launches,
    promise,
    quantize_tile,
    three,
)

# Warps of a program with a tile of 128 x 128.
SQUARE_WARPS = 8


@op
def stack_weights(weights: List[Tensor], amax: Tensor, transposed: bool) -> Tuple[Tensor, Tensor]:
    """Quantize weights (N_i, K) to one E4M3 operand, (sum N, K) or if `transposed` (K, sum N), and its 0-d scale.

    amax: 0-d FP32, their common maximum.
    """
    data, scale = quantize_tensor(torch.cat(weights), E4M3, amax)
    return _transposed(data) if transposed else data, scale


def _transposed(data: Tensor) -> Tensor:
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def empty(weights: List[Tensor], transposed: bool = False) -> Tuple[Tensor, Tensor]:
    """Allocate a stacked operand and its scale."""
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
    """Stack E4M3 codes (N_i, K) of weights that share a scale to (sum N, K), or if `transposed` (K, sum N)."""
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
    """Return L4: `blocks(size)`, rounded up to a multiple of 4, as the GEMM needs for 128x128 scales."""
    return (blocks(size) + 3) // 4 * 4


@op
def block_stack_weights(weights: List[Tensor], transposed: bool) -> Tuple[Tensor, Tensor]:
    """Quantize weights (N_i, K) to one E4M3 operand in 128x128 blocks of the stacked matrix (N, K), N = sum N_i.

    A block may span two weights if a row count is no multiple of 128. Both layouts hold the same numbers.

    Returns:
        data (N, K), scale (ceil(N / 128), L4 of K); if `transposed` data (K, N), scale (ceil(K / 128), L4 of N).
    """
    data, scale = quantize_blocks(torch.cat([w.float() for w in weights]), (BLOCK, BLOCK), E4M3)
    if transposed:
        data, scale = _transposed(data), scale.t()
    return data, F.pad(scale, (0, padded_blocks(data.shape[1]) - scale.shape[1])).contiguous()


@block_stack_weights.fake
def _empty_blocks(weights, transposed):
    """Allocate data and scale; the scale's padding is zero."""
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


# The most weights and operands of one launch.
WEIGHTS, OPERANDS = 8, 4
# Programs per weight that check whether its copy is right: enough to fill the GPU, few enough to end within 3 us.
CHECKS = 132 * 4
# FP32 slots per scale or maximum, of which the first is used: addresses in cached launches are multiples of 16 bytes.
APART = 4


def grouped(weights: Any, counts: Sequence[int]) -> list[Any]:
    """Split weights into one list per operand, of counts[j] each."""
    groups: list[Any] = []
    first = 0
    for count in counts:
        groups.append(weights[first : first + count])
        first += count
    return groups


def numbers_of(numbers: Tensor) -> list[Tensor]:
    """Return the scale or maximum of each operand, 0-d, from numbers (operands, APART)."""
    return list(numbers.select(1, 0).unbind())


def _apart(numbers: Sequence[Tensor]) -> Tensor:
    return F.pad(torch.stack(list(numbers))[:, None], (0, APART - 1))


@op
def stack_operands(weights: List[Tensor], counts: List[int], amaxes: List[Tensor], transposed: bool) -> List[Tensor]:
    """Quantize several operands, the j-th of counts[j] weights (N_i, K_j), with given maxima (0-d FP32 each).

    Returns:
        E4M3 data of each, (sum N_i, K_j), or (K_j, sum N_i) if `transposed`; then their scales (see `numbers_of`).
    """
    pairs = zip(grouped(weights, counts), amaxes, strict=True)
    data, scales = zip(*[stack_weights.reference(each, amax, transposed) for each, amax in pairs], strict=True)
    return [*data, _apart(scales)]


@stack_operands.fake
def _(weights, counts, amaxes, transposed):
    data = [empty(each, transposed)[0] for each in grouped(weights, counts)]
    return [*data, weights[0].new_empty(len(counts), APART, dtype=torch.float32)]


@op
def quantize_operands(weights: List[Tensor], counts: List[int], last: List[Tensor]) -> List[Tensor]:
    """Find the maxima, then do as `stack_operands` does; the maxima (see `numbers_of`) are the last result.

    last: predicted maxima, 0-d FP32 each, or []; they change the time, not the results.
    """
    tops = [torch.stack([w.abs().amax().float() for w in each]).amax() for each in grouped(weights, counts)]
    return [*stack_operands.reference(weights, counts, tops, False), _apart(tops)]


@quantize_operands.fake
def _(weights, counts, last):
    results = stack_operands.shapes(weights, counts, last, False)
    return [*results, torch.empty_like(results[-1])]


# The last maxima of parameters, by device, stream and the parameters' ids; and weak references whose callbacks remove
# the entry when a parameter is freed.
_remembered: dict[Any, Tuple[List[Tensor], Any]] = {}


def quantize_parameters(weights: List[Tensor], counts: List[int]) -> Tuple[List[Tensor], List[Tensor], List[Tensor]]:
    """Return data, scales and maxima of `quantize_operands`, with the last call's maxima as predictions.

    Predictions are kept for BF16 parameters on a GPU. Not for tensors derived from parameters, which are new each time,
    and not in CUDA graphs, which would read freed memory.
    """
    first = weights[0]
    if (
        torch.compiler.is_compiling() or not first.is_cuda or first.dtype != bfloat16
        or {*map(type, weights)} != {Parameter} or torch.cuda.is_current_stream_capturing()
    ):  # fmt: skip
        *data, scales, tops = quantize_operands(weights, counts, [])
        return data, numbers_of(scales), numbers_of(tops)
    # Key by stream, so that memory is not reused while a kernel reads it; by device, since parameters may move.
    device = first.get_device()
    key = (device, torch._C._cuda_getCurrentRawStream(device), *counts, *map(id, weights))
    last, forget = _remembered.get(key) or ([], [weakref.ref(w, lambda _: _remembered.pop(key, None)) for w in weights])
    *data, scales, tops = quantize_operands(weights, counts, last)
    found = numbers_of(tops)
    _remembered[key] = found, forget
    return data, numbers_of(scales), found


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _of_four(i, a, b, c, d, COUNT: tl.constexpr):
    """Return the i-th argument; only the first COUNT exist."""
    chosen = a
    if COUNT > 1:
        if i == 1:
            chosen = b
        if i == 2:
            chosen = c
        if i == 3:
            chosen = d
    return chosen


@triton.jit
def _of_eight(i, a, b, c, d, e, f, g, h, COUNT: tl.constexpr):
    chosen = _of_four(i, a, b, c, d, COUNT)
    if COUNT > 4:  # noqa: SIM102
        if i > 3:
            chosen = _of_four(i - 4, e, f, g, h, 4)
    return chosen


@kernel
def _operands_kernel(
    w0_ptr, w1_ptr, w2_ptr, w3_ptr, w4_ptr, w5_ptr, w6_ptr, w7_ptr,  # (N, K) each
    amax0_ptr, amax1_ptr, amax2_ptr, amax3_ptr,  # 0-d FP32 of each operand: its maximum, true or predicted
    out0_ptr, out1_ptr, out2_ptr, out3_ptr,  # E4M3 (rows, K) each; (K, rows) if TRANSPOSED
    tops_ptr,  # (operands, APART) FP32: maxima, found if FIND; compared with the others if CHECKS
    scales_ptr,  # (operands, APART) FP32; unless FIND
    N0, N1, N2, N3, N4, N5, N6, N7,  # rows, in UNIT_N
    first0, first1, first2, first3, first4, first5, first6, first7,  # rows of the operand above the weight's, in UNIT_N
    K0, K1, K2, K3,  # in UNIT_K
    rows0, rows1, rows2, rows3,  # in UNIT_N
    UNIT_N: tl.constexpr, UNIT_K: tl.constexpr,
    SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr,  # the first weights of these operands
    COUNT: tl.constexpr, FIND: tl.constexpr, CODES: tl.constexpr, CHECKS: tl.constexpr, TRANSPOSED: tl.constexpr,
    INVERSE_MAX: tl.constexpr, ALIGN: tl.constexpr, APART: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(1)
    j = (i >= SECOND).to(tl.int32) + (i >= THIRD).to(tl.int32) + (i >= FOURTH).to(tl.int32)
    w_ptr = _of_eight(i, w0_ptr, w1_ptr, w2_ptr, w3_ptr, w4_ptr, w5_ptr, w6_ptr, w7_ptr, COUNT)
    # Triton cannot tell whether a chosen value is a multiple of 16; of a product with 16 it can.
    N = _of_eight(i, N0, N1, N2, N3, N4, N5, N6, N7, COUNT) * UNIT_N
    first = _of_eight(i, first0, first1, first2, first3, first4, first5, first6, first7, COUNT) * UNIT_N
    out_ptr = _of_four(j, out0_ptr, out1_ptr, out2_ptr, out3_ptr, COUNT)
    K, rows = _of_four(j, K0, K1, K2, K3, COUNT) * UNIT_K, _of_four(j, rows0, rows1, rows2, rows3, COUNT) * UNIT_N
    across = tl.cdiv(K, BK)
    tiles, amax = tl.cdiv(N, BN) * across, tl.load(_of_four(j, amax0_ptr, amax1_ptr, amax2_ptr, amax3_ptr, COUNT))
    if CHECKS:
        top = tl.load(tops_ptr + j * APART)
        if top.to(tl.int32, bitcast=True) == amax.to(tl.int32, bitcast=True):  # as bits: NaN equals NaN
            tiles = 0
        amax = top
    scale = scale_of(amax, INVERSE_MAX)
    if not FIND:
        lane = tl.arange(0, APART)
        tl.store(scales_ptr + j * APART + lane, tl.where(lane == 0, scale, 0.0), mask=tl.program_id(0) + lane * 0 == 0)
    inverse = inverse_of(scale)
    n, k, pair = tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BN // 2)
    found = 0.0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        n0, k0 = tile // across * BN, tile % across * BK
        w_tile, row = w_ptr + (n0.to(tl.int64) * K + k0), (first + n0).to(tl.int64)
        if TRANSPOSED:
            _, even = quantize_tile(w_tile, w_tile, 2 * pair, k, N - n0, K - k0, K, inverse, False, ALIGN)
            _, odd = quantize_tile(w_tile, w_tile, 2 * pair + 1, k, N - n0, K - k0, K, inverse, False, ALIGN)
            words = tl.trans(pack_rows(even, odd, out_ptr.dtype.element_ty))
            inside = (k < K - k0)[:, None] & (pair < (N - n0) // 2)[None, :]
            target = as_words(out_ptr, 16) + (k0.to(tl.int64) * (rows // 2) + row // 2)
            tl.store(target + (k[:, None] * (rows // 2) + pair[None, :]), words, mask=inside)
        else:
            out_tile = out_ptr + (row * K + k0)
            w, _ = quantize_tile(w_tile, out_tile, n, k, N - n0, K - k0, K, inverse, CODES, ALIGN)
            if FIND:
                found = larger(found, max_magnitude(max_magnitude(w, 1), 0))
    if FIND:
        atomic_amax(tops_ptr + j * APART, found)


def _fits(weights: Sequence[Tensor], counts: Sequence[int], transposed: bool) -> bool:
    """True if the kernel takes these weights. Transposed, two rows are one word; Triton specializes on a size of 1."""
    if len(weights) > WEIGHTS or len(counts) > OPERANDS or len({w.dtype for w in weights}) > 1:
        return False
    return all(min(w.shape) > 1 and not (transposed and w.shape[0] % 2) for w in weights)


@functools.lru_cache(1024)
def _numbers(shapes: Tuple[Any, ...], counts: Tuple[int, ...], transposed: bool) -> Tuple[Tuple[int, ...], int, int]:
    """Return the kernel's table of weights, all column counts or'ed together, and the tiles of the largest weight."""
    groups, tile = grouped(shapes, counts), TRANSPOSED_TILE if transposed else PLAIN_TILE
    sizes, columns = [n for n, _ in shapes], [each[0][1] for each in groups]
    firsts = [sum(n for n, _ in each[:i]) for each in groups for i in range(len(each))]
    rows = [sum(n for n, _ in each) for each in groups]
    begins = [sum(counts[:j]) if j < len(counts) else WEIGHTS for j in range(1, OPERANDS)]
    unit_n, unit_k = _unit(sizes), _unit(columns)
    numbers = [n // unit_n for n in (*_filled(sizes), *_filled(firsts))]
    numbers += [k // unit_k for k in _filled(columns, OPERANDS)] + [n // unit_n for n in _filled(rows, OPERANDS)]
    tiles = max(cdiv(n, tile[0]) * cdiv(k, tile[1]) for n, k in shapes)
    return (*numbers, unit_n, unit_k, *begins), functools.reduce(operator.or_, columns), tiles


def _unit(sizes: Sequence[int]) -> int:
    """Return 16 if all sizes are multiples of 16 above 16, else 1. (16 / 16 = 1 would be compiled in by Triton.)"""
    return 16 if min(sizes) > 16 and all(size % 16 == 0 for size in sizes) else 1


def _filled(items: Sequence[Any], size: int = WEIGHTS) -> list[Any]:
    """Pad a list to `size` items with its first item."""
    return [*items, *[items[0]] * (size - len(items))]


class _Launches:
    """Launches of `_operands_kernel` on some weights: allocates the operands' data and scales, `run` fills them."""

    def __init__(self, weights: Sequence[Tensor], counts: Sequence[int], transposed: bool) -> None:
        shapes = tuple([tuple(w.shape) for w in weights])
        self.numbers, columns, self.tiles = _numbers(shapes, tuple(counts), transposed)
        self.weights, self.transposed = [w.contiguous() for w in weights], transposed
        self.align = alignment(self.weights, columns)
        self.data = [empty(each, transposed)[0] for each in grouped(weights, counts)]
        self.scales = weights[0].new_empty(len(counts), APART, dtype=torch.float32)

    def run(self, amaxes: Sequence[Tensor], tops: Tensor, programs: int, find: bool, codes: bool, checks: bool) -> None:
        """Launch at most `programs` programs per weight; find, codes, checks: the kernel's FIND, CODES, CHECKS."""
        _operands_kernel[(min(self.tiles, programs), len(self.weights))](
            *_filled(self.weights), *_filled(amaxes, OPERANDS), *_filled(self.data, OPERANDS), tops, self.scales,
            *self.numbers, len(self.weights), find, codes, checks, self.transposed, inverse_max("e4m3"), self.align,
            APART, *(TRANSPOSED_TILE if self.transposed else PLAIN_TILE), num_warps=4, **EXACT,
        )  # fmt: skip

    @property
    def results(self) -> list[Tensor]:
        return [*self.data, self.scales]


@stack_operands.cuda
def _(weights, counts, amaxes, transposed):
    if len(counts) == 1 or not _fits(weights, counts, transposed):
        return _one_by_one(weights, counts, amaxes, transposed)
    launches = _Launches(weights, counts, transposed)
    launches.run(amaxes, launches.scales, launches.tiles, False, True, False)
    return launches.results


def _one_by_one(weights, counts, amaxes, transposed):
    pairs = zip(grouped(weights, counts), amaxes, strict=True)
    data, scales = zip(*[stack_weights.kernel(each, amax, transposed) for each, amax in pairs], strict=True)
    return [*data, _apart(scales)]


@quantize_operands.cuda
def _(weights, counts, last):
    if not _fits(weights, counts, False):
        tops = [launch_amax(each) for each in grouped(weights, counts)]
        return [*_one_by_one(weights, counts, tops, False), _apart(tops)]
    launches, tops = _Launches(weights, counts, False), weights[0].new_zeros(len(counts), APART, dtype=torch.float32)
    if last:
        launches.run(last, tops, launches.tiles, True, True, False)
        launches.run(last, tops, CHECKS, False, True, True)
    else:
        found = numbers_of(tops)
        launches.run(found, tops, AMAX_PROGRAMS, True, False, False)
        launches.run(found, tops, launches.tiles, False, True, False)
    return [*launches.results, tops]
