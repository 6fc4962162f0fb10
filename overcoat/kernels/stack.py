"""Weights that share one FP8 operand (q, k, v; gate, up): their common maximum, and the stacked copy.

Bytes moved, with N elements of 2 bytes in all: maximum 2N, stacked copy 3N, less what of the first pass is in the L2
cache still. Up to `PER_LAUNCH` weights are taken by one launch: the kernels take some 10 us each, a launch of its own
as much. They equal the references bit for bit.

Legend: N rows of a weight, K its columns.
"""

from __future__ import annotations

from typing import List, Tuple

import torch
from torch import Tensor

from overcoat.formats import E4M3, cast_float8, scale_from_amax
from overcoat.kernels.op import op
from overcoat.kernels.quantize import launch_amax, launch_quantize


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
def quantize_weights(weights: List[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """`stack_weights` (sum N, K) with the maximum found first: data, scale, max |w| over all weights (0-d FP32)."""
    top = torch.stack([w.abs().amax().float() for w in weights]).amax()
    return *stack_weights.reference(weights, top, False), top


@quantize_weights.fake
def _(weights):
    return *_empty(weights), weights[0].new_empty((), dtype=torch.float32)


@quantize_weights.cuda
def _(weights):
    top = launch_amax(weights)
    return *stack_weights.kernel(weights, top, False), top


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
