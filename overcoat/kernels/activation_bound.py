"""A bound of the gradient of z, so that its scale is there before it is (activation_backward.py).

    |dz| <= max |dh| * max |f'|
    |dz| <= max |dh| * max(max |up| max |f'|, max |f|)      gated

Each maximum is a group's: of dh as read, of f and f' as the kept maxima of gate allow. The largest of all groups is up
to 7 times max |dz| on what was tried: in a floating-point format that costs range, not precision. T * I * 2 bytes read.

Legend: T tokens, I intermediate width, F = 2 if gated, else 1, G group size, GP = G rounded up to a power of 2, n =
ceil(I / G) groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overcoat.formats import to_groups
from overcoat.kernels.activation_functions import ROUNDING, activation_of
from overcoat.kernels.device import EXACT, atomic_amax, larger, max_magnitude, power_of_2
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, dense, kernel
from overcoat.kernels.op import op
from overcoat.kernels.tiles import listed_groups

_ROUNDING = tl.constexpr(ROUNDING)


@op
def activation_gradient_bound(dh: Tensor, group_amax: Tensor, activation: str, group_size: int) -> Tensor:
    """What no |dz| exceeds, 0-d FP32; not finite where dh, z or a product of their maxima is not.

    Args:
        dh: (T, I), gradient of h; group_amax: (T, F, n), as kept.
    """
    function, peak = activation_of(activation).reference, activation_of(activation).peak
    gate, *up = group_amax.float().unbind(1)
    largest = to_groups(dh, group_size).abs().amax(-1).float()  # (T, n)
    _, slope = function(gate.clamp(max=peak))
    bound = torch.maximum(largest * up[0] * slope, largest * function(gate)[0]) if up else largest * slope
    return torch.where(gate < torch.inf, bound, torch.nan).amax() * ROUNDING


@kernel
def _activation_bound_kernel(
    dh_ptr,  # (T, I)
    amax_ptr,  # (T, F, n) BF16
    top_ptr,  # 0-d FP32: the bound
    groups,  # T * n
    n, I, FUNCTION: tl.constexpr, PEAK: tl.constexpr, GATED: tl.constexpr, G: tl.constexpr,  # noqa: E741
    GP: tl.constexpr, NG: tl.constexpr,
):  # fmt: skip
    # From L2: what this multiprocessor's own cache holds is as old as its first program.
    seen = tl.load(top_ptr, cache_modifier=".cg")
    group, row, known, column, inside = listed_groups(groups, n, I, G, GP, NG)
    dh = tl.load(dh_ptr + (row.to(tl.int64)[:, None] * I + column), mask=inside, other=0.0)
    places = group + row * n if GATED else group  # among (T, F, n)
    gate = tl.load(amax_ptr + places, mask=known, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(amax_ptr + n + places, mask=known, other=0.0).to(tl.float32)
    largest = max_magnitude(dh.to(tl.float32), 1)
    slope = FUNCTION(tl.minimum(gate, PEAK))[1]
    bound = largest * slope
    if GATED:
        bound = larger(largest * up * slope, largest * FUNCTION(gate)[0])
    bound = max_magnitude(tl.where(gate < float("inf"), bound, float("nan")), 0) * _ROUNDING
    if bound.to(tl.int32, bitcast=True) > seen.to(tl.int32, bitcast=True):
        atomic_amax(top_ptr, bound)


# Gradients of a program that bounds them.
BOUND_TILE = 4096


@activation_gradient_bound.cuda
def _(dh, group_amax, activation, group_size):
    dh, group_amax = dense(dh, group_amax)
    (tokens, width), (_, parts, n) = dh.shape, group_amax.shape
    chosen, gp = activation_of(activation), power_of_2(group_size)
    top, count = dh.new_zeros((), dtype=torch.float32), max(BOUND_TILE // gp, 1)
    _activation_bound_kernel[(cdiv(tokens * n, count),)](
        dh, group_amax, top, tokens * n, n, width, chosen.device, chosen.peak, parts == 2, group_size, gp, count,
        num_warps=1, **EXACT,
    )  # fmt: skip
    return top
