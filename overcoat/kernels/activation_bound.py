"""A bound of the activation's gradient: the FP8 scale of dz, before dz is there.

    dz = dh f'(z)                             |dz| <= max |dh| * max |f'|
    dz = (dh up f'(gate), dh f(gate))         |dz| <= max |dh| * max(max |up| max |f'|, max |f|)      gated

Each maximum is a group's: of dh as read here, of f and f' as the kept maxima of gate allow. The largest of all groups
is up to 7 times max |dz| on what was tried: in a floating-point format that costs range, not precision. The codes, from
which the maximum itself would come, are not read. With V = T * I * 2: V read.

Legend: T tokens, I intermediate width, G group size, GP = G rounded up to a power of 2, n = ceil(I / G) groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overcoat.formats import to_groups
from overcoat.kernels.activation_functions import ROUNDING, activation_of
from overcoat.kernels.device import EXACT, atomic_amax, larger, max_magnitude, power_of_2
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, dense, kernel, on_device
from overcoat.kernels.op import op
from overcoat.kernels.tiles import listed_magnitude, whole_groups

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
    top_ptr,  # 0-d int32: bits of the bound
    groups,  # T * n
    n,
    I,  # noqa: E741
    FUNCTION: tl.constexpr,
    PEAK: tl.constexpr,
    GATED: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    NG: tl.constexpr,
    WHOLE: tl.constexpr,
):
    # From L2: what this multiprocessor's own cache holds is as old as its first program.
    seen = tl.load(top_ptr, cache_modifier=".cg")
    group = tl.program_id(0) * NG + tl.arange(0, NG)
    places = group
    if GATED:
        places = group + (group // n) * n  # among (T, 2, n)
    gate = tl.load(amax_ptr + places, mask=group < groups, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(amax_ptr + n + places, mask=group < groups, other=0.0).to(tl.float32)
    largest = listed_magnitude(dh_ptr, groups, n, I, G, GP, NG, WHOLE)
    slope = FUNCTION(tl.minimum(gate, PEAK))[1]
    bound = largest * slope
    if GATED:
        bound = larger(largest * up * slope, largest * FUNCTION(gate)[0])
    bound = max_magnitude(tl.where(gate < float("inf"), bound, float("nan")), 0) * _ROUNDING
    if bound.to(tl.int32, bitcast=True) > seen:
        atomic_amax(top_ptr, bound)


# Gradients of a program that bounds them.
BOUND_TILE = 4096


@activation_gradient_bound.cuda
def _(dh, group_amax, activation, group_size):
    dh, group_amax = dense(dh, group_amax)
    (tokens, width), (_, parts, n) = dh.shape, group_amax.shape
    chosen, gp = activation_of(activation), power_of_2(group_size)
    top, count = torch.zeros((), dtype=torch.int32, device=dh.device), max(BOUND_TILE // gp, 1)
    with on_device(dh):
        _activation_bound_kernel[(cdiv(tokens * n, count),)](
            dh, group_amax, top, tokens * n, n, width, chosen.device, chosen.peak, parts == 2, group_size, gp, count,
            whole_groups(dh, group_size), num_warps=1, **EXACT,
        )  # fmt: skip
    return top.view(torch.float32)
