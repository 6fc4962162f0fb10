"""The stacked FP8 copy of weights whose maximum is predicted: one pass over them where the prediction is right.

The copy is quantized with the predicted maximum, and the true one found on the way. A second launch compares the two
and quantizes again if they differ; else its few programs end at once. The result never depends on the prediction
(weight_amax.py).

Bytes moved, with N elements of 2 bytes in all: 3N; 6N if the prediction was wrong.

Legend: N rows of a weight, K its columns.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from overcoat import weight_amax
from overcoat.formats import E4M3
from overcoat.kernels.device import EXACT, atomic_amax, inverse_max, inverse_of, max_magnitude, scale_of, to_float8
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, kernel, on_device
from overcoat.kernels.op import op
from overcoat.kernels.stack import (
    PLAIN_TILE,
    alignment,
    choose,
    launches,
    promise,
    stack_amax,
    stack_weights,
    three,
)

# Programs of the second launch for each weight: enough to fill the GPU, few enough to start and end within 3 us.
REQUANTIZE_PROGRAMS = 132 * 4


@op
def stack_weights_predicted(weights: List[Tensor], predicted: List[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """`stack_weights` (sum N, K) with the scale for `stack_amax`, which is returned as well: data, scale, maximum.

    predicted: what each weight's maximum should be, 0-d FP32, as `AdamW` found it when it wrote the weight
    (weight_amax.py). The result does not depend on them, its time does: right ones save the kernel a pass.
    """
    top = stack_amax.reference(weights)
    return *stack_weights.reference(weights, top, False), top


@stack_weights_predicted.fake
def _(weights, predicted):
    return _stacked_shapes(weights)


@op
def stack_weights_tracked(weights: List[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """`stack_weights_predicted` that asks for the predictions itself, each time it runs: compiled code cannot.

    Where nothing is known it finds the maximum, and records it nowhere: the memory may be a CUDA graph's.
    """
    top = stack_amax.reference(weights)
    return *stack_weights.reference(weights, top, False), top


@stack_weights_tracked.fake
def _(weights):
    return _stacked_shapes(weights)


def _stacked_shapes(weights: List[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    rows = sum(w.shape[0] for w in weights)
    data = weights[0].new_empty((rows, weights[0].shape[1]), dtype=E4M3.dtype)
    return data, weights[0].new_empty((), dtype=torch.float32), weights[0].new_empty((), dtype=torch.float32)


@triton.jit
def _largest(a_ptr, b_ptr, c_ptr):
    """Bits of the largest of three FP32 >= 0, which order like the values, NaN on top."""
    a = tl.load(a_ptr).to(tl.int32, bitcast=True)
    b = tl.load(b_ptr).to(tl.int32, bitcast=True)
    c = tl.load(c_ptr).to(tl.int32, bitcast=True)
    return tl.maximum(a, tl.maximum(b, c))


@triton.jit
def _copy_tile(
    w_ptr, out_ptr, n0, k0, row0, N, K, inverse, ALIGN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Write the codes of the tile at (n0, k0) of a weight whose first row in `out` is row0; returns the tile."""
    n, k = tl.arange(0, BN), tl.arange(0, BK)
    inside = (n < N - n0)[:, None] & (k < K - k0)[None, :]
    within = n[:, None] * K + k[None, :]
    w_ptr += n0.to(tl.int64) * K + k0
    out_ptr += (row0 + n0).to(tl.int64) * K + k0
    w = tl.load(promise(w_ptr + within, ALIGN), mask=inside, other=0.0).to(tl.float32)
    tl.store(promise(out_ptr + within, ALIGN), to_float8(w * inverse, tl.float8e4nv), mask=inside)
    return w


@kernel
def _copy_and_find_kernel(
    a_ptr,  # (NA, K)
    b_ptr,  # (NB, K)
    c_ptr,  # (NC, K)
    a_predicted,  # 0-d FP32 each
    b_predicted,
    c_predicted,
    found_ptr,  # 0-d int32, 0: bits of the FP32 maximum
    out_ptr,  # (NA + NB + NC, K) FP8
    NA,
    NB,
    NC,
    K,
    INVERSE_MAX: tl.constexpr,
    ALIGN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    top = _largest(a_predicted, b_predicted, c_predicted).to(tl.float32, bitcast=True)
    inverse = inverse_of(scale_of(top, INVERSE_MAX))
    w_ptr, N, row0 = choose(a_ptr, b_ptr, c_ptr), choose(NA, NB, NC), choose(0, NA, NA + NB)
    n0, k0 = tl.program_id(0) * BN, tl.program_id(1) * BK
    if n0 < N:
        w = _copy_tile(w_ptr, out_ptr, n0, k0, row0, N, K, inverse, ALIGN, BN, BK)
        atomic_amax(found_ptr, max_magnitude(max_magnitude(w, 1), 0))


@kernel
def _requantize_if_changed_kernel(
    a_ptr,  # as above
    b_ptr,
    c_ptr,
    a_predicted,
    b_predicted,
    c_predicted,
    found_ptr,
    out_ptr,
    scale_ptr,  # 0-d FP32
    NA,
    NB,
    NC,
    K,
    INVERSE_MAX: tl.constexpr,
    ALIGN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    found = tl.load(found_ptr)
    scale = scale_of(found.to(tl.float32, bitcast=True), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(2) == 0)
    inverse = inverse_of(scale)
    w_ptr, N, row0 = choose(a_ptr, b_ptr, c_ptr), choose(NA, NB, NC), choose(0, NA, NA + NB)
    across = tl.cdiv(K, BK)
    tiles = tl.cdiv(N, BN) * across
    if found == _largest(a_predicted, b_predicted, c_predicted):
        tiles = 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _copy_tile(w_ptr, out_ptr, tile // across * BN, tile % across * BK, row0, N, K, inverse, ALIGN, BN, BK)


def _launch_predicted(weights: list[Tensor], predicted: Optional[list[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (N_i, K) as (sum N, K) with one scale, the scale, and the maximum, which should be the largest predicted.

    predicted: None where there are none.
    """
    parts = launches(weights)
    if predicted is None or len(parts) > 1:  # many weights, or of several dtypes
        top = stack_amax.kernel(weights)
        return *stack_weights.kernel(weights, top, False), top
    (part,) = parts
    sizes, columns = [w.shape[0] for w in part], weights[0].shape[1]
    out = torch.empty((sum(sizes), columns), dtype=E4M3.dtype, device=part[0].device)
    found = torch.zeros((), dtype=torch.int32, device=out.device)
    scale = torch.empty((), dtype=torch.float32, device=out.device)
    rows, width = PLAIN_TILE
    align = alignment(part) if columns % 16 == 0 else 1
    down, right = cdiv(max(sizes), rows), cdiv(columns, width)
    pointers = (*three(part), *three(predicted), found, out)
    numbers = (*three(sizes), columns, inverse_max("e4m3"), align, *PLAIN_TILE)
    with on_device(out):
        _copy_and_find_kernel[(down, right, len(part))](*pointers, *numbers, num_warps=4, **EXACT)
        programs = min(REQUANTIZE_PROGRAMS, max(down * right, 1))
        _requantize_if_changed_kernel[(programs, 1, len(part))](*pointers, scale, *numbers, num_warps=4, **EXACT)
    return out, scale, found.view(torch.float32)


@stack_weights_predicted.cuda
def _(weights, predicted):
    return _launch_predicted(weights, predicted)


@stack_weights_tracked.cuda
def _(weights):
    return _launch_predicted(weights, weight_amax.predict(weights))
