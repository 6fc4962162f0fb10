"""Weights that share one FP8 operand (q, k, v; gate, up): their common maximum, and the stacked copy.

A predicted maximum (weight_amax.py) saves a pass: the copy is quantized with it, and the true one found on the way. A
second launch compares the two and quantizes again if they differ; else its few programs end at once. The result never
depends on the prediction.

Bytes moved, with N elements of 2 bytes in all: maximum 2N, stacked copy 3N, with its maximum 3N; 6N if the prediction
was wrong. Up to `PER_LAUNCH` weights are taken by one launch: the kernels take some 10 us each, a launch of its own as
much. They equal the references bit for bit.

Legend: N rows of a weight, K its columns.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from overcoat import weight_amax
from overcoat.formats import E4M3, cast_float8, scale_from_amax
from overcoat.kernels.device import EXACT, atomic_amax, inverse_max, inverse_of, max_magnitude, scale_of
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, kernel
from overcoat.kernels.op import op
from overcoat.kernels.quantize import (
    PLAIN_TILE,
    alignment,
    choose,
    launch_amax,
    launch_quantize,
    launches,
    quantize_tile,
    three,
)

# Programs of the second launch for each weight: enough to fill the GPU, few enough to start and end within 3 us.
REQUANTIZE_PROGRAMS = 132 * 4


@op
def stack_amax(weights: List[Tensor]) -> Tensor:
    """max |w| over several weights, 0-d FP32: they share one scale, being one operand of one GEMM."""
    return torch.stack([w.abs().amax().float() for w in weights]).amax()


@stack_amax.cuda
def _(weights):
    return launch_amax(weights)


@op
def stack_weights(weights: List[Tensor], amax: Tensor, transposed: bool) -> Tuple[Tensor, Tensor]:
    """Weights (N_i, K) as one E4M3 operand: (sum N, K), or (K, sum N) if `transposed`, and their common scale."""
    scale = scale_from_amax(amax, E4M3)
    data = cast_float8(torch.cat([w.float() for w in weights]) * (1.0 / scale), E4M3)
    return _transposed(data) if transposed else data, scale


def _transposed(data: Tensor) -> Tensor:
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def _empty(weights: List[Tensor], transposed: bool = False) -> Tuple[Tensor, Tensor]:
    """Uninitialised stacked operand and scale."""
    shape = (sum([w.shape[0] for w in weights]), weights[0].shape[1])
    data = weights[0].new_empty(shape[::-1] if transposed else shape, dtype=E4M3.dtype)
    return data, weights[0].new_empty((), dtype=torch.float32)


@stack_weights.fake
def _(weights, amax, transposed):
    return _empty(weights, transposed)


@stack_weights.cuda
def _(weights, amax, transposed):
    if transposed and any(w.shape[0] % 2 for w in weights):
        data, scale = stack_weights.kernel(weights, amax, False)
        return _transposed(data), scale
    out, scale = _empty(weights, transposed)
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
    return _empty(codes, transposed)[0]


@stack_codes.cuda
def _(codes, transposed):
    if not transposed or any(each.shape[0] % 2 for each in codes):
        return stack_codes.reference(codes, transposed)
    out, one = _empty(codes, True)
    launch_quantize(codes, one.fill_(1.0), None, out, None, "e4m3")  # times 1: the same codes
    return out


# ---- with a predicted maximum ----------------------------------------------------------------------------------------


@op
def stack_weights_predicted(weights: List[Tensor], predicted: List[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """`stack_weights` (sum N, K) with the scale for `stack_amax`, which is returned as well: data, scale, maximum.

    predicted: what each weight's maximum should be, 0-d FP32, as `AdamW` found it when it wrote the weight. The result
    does not depend on them, its time does.
    """
    top = stack_amax.reference(weights)
    return *stack_weights.reference(weights, top, False), top


@op
def stack_weights_tracked(weights: List[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """`stack_weights_predicted` that asks for the predictions itself, each time it runs: compiled code cannot.

    Where nothing is known it finds the maximum, and records it nowhere: the memory may be a CUDA graph's.
    """
    return stack_weights_predicted.reference(weights, [])


@stack_weights_predicted.fake
@stack_weights_tracked.fake
def _(weights, predicted=None):
    return *_empty(weights), weights[0].new_empty((), dtype=torch.float32)


@triton.jit
def _largest(a_ptr, b_ptr, c_ptr):
    """Bits of the largest of three FP32 >= 0, which order like the values, NaN on top."""
    a = tl.load(a_ptr).to(tl.int32, bitcast=True)
    b = tl.load(b_ptr).to(tl.int32, bitcast=True)
    c = tl.load(c_ptr).to(tl.int32, bitcast=True)
    return tl.maximum(a, tl.maximum(b, c))


@triton.jit
def _copy_tile(w_ptr, out_ptr, n0, k0, row0, N, K, inverse, ALIGN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Write the codes of the tile at (n0, k0) of a weight whose first row in `out` is row0; returns the tile."""
    w_ptr += n0.to(tl.int64) * K + k0
    out_ptr += (row0 + n0).to(tl.int64) * K + k0
    n, k = tl.arange(0, BN), tl.arange(0, BK)
    return quantize_tile(w_ptr, out_ptr, n, k, N - n0, K - k0, K, inverse, True, ALIGN)[0]


@kernel
def _predicted_kernel(
    a_ptr,  # (NA, K)
    b_ptr,  # (NB, K)
    c_ptr,  # (NC, K)
    a_predicted,  # 0-d FP32 each
    b_predicted,
    c_predicted,
    found_ptr,  # 0-d int32: bits of the FP32 maximum; raised from 0 by the first launch
    out_ptr,  # (NA + NB + NC, K) FP8
    scale_ptr,  # 0-d FP32, written by the second
    NA,
    NB,
    NC,
    K,
    INVERSE_MAX: tl.constexpr,
    ALIGN: tl.constexpr,
    AGAIN: tl.constexpr,  # the second launch
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    top = _largest(a_predicted, b_predicted, c_predicted)
    w_ptr, N, row0 = choose(a_ptr, b_ptr, c_ptr), choose(NA, NB, NC), choose(0, NA, NA + NB)
    if AGAIN:
        found = tl.load(found_ptr)
        scale = scale_of(found.to(tl.float32, bitcast=True), INVERSE_MAX)
        tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(2) == 0)
        inverse, across = inverse_of(scale), tl.cdiv(K, BK)
        tiles = tl.cdiv(N, BN) * across
        if found == top:
            tiles = 0
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _copy_tile(w_ptr, out_ptr, tile // across * BN, tile % across * BK, row0, N, K, inverse, ALIGN, BN, BK)
    else:
        inverse = inverse_of(scale_of(top.to(tl.float32, bitcast=True), INVERSE_MAX))
        n0, k0 = tl.program_id(0) * BN, tl.program_id(1) * BK
        if n0 < N:
            w = _copy_tile(w_ptr, out_ptr, n0, k0, row0, N, K, inverse, ALIGN, BN, BK)
            atomic_amax(found_ptr, max_magnitude(max_magnitude(w, 1), 0))


def _launch_predicted(weights: list[Tensor], predicted: Optional[list[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    parts = launches(weights)
    if not predicted or len(parts) > 1:  # many weights, or of several dtypes
        top = launch_amax(weights)
        return *stack_weights.kernel(weights, top, False), top
    (part,), (out, scale) = parts, _empty(weights)
    found = out.new_zeros((), dtype=torch.int32)
    sizes, columns = [w.shape[0] for w in part], out.shape[1]
    down, right = cdiv(max(sizes), PLAIN_TILE[0]), cdiv(columns, PLAIN_TILE[1])
    pointers = (*three(part), *three(predicted), found, out, scale)
    numbers = (*three(sizes), columns, inverse_max("e4m3"), alignment(part, columns))
    for grid, again in ((down, right), False), ((min(REQUANTIZE_PROGRAMS, max(down * right, 1)), 1), True):
        _predicted_kernel[(*grid, len(part))](*pointers, *numbers, again, *PLAIN_TILE, num_warps=4, **EXACT)
    return out, scale, found.view(torch.float32)


@stack_weights_predicted.cuda
def _(weights, predicted):
    return _launch_predicted(weights, predicted)


@stack_weights_tracked.cuda
def _(weights):
    return _launch_predicted(weights, weight_amax.predict(weights))
