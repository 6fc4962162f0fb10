"""Variations of "8bit", to see whether a change of either code is better at the same bytes. For measurement alone.

m, with y = m/M, one BF16 maximum M per group as sqrt8 has, and sqrt8's rounding, where not said:
    to nearest          sqrt8 with maxima and small codes to nearest, where a step's means would stop
    softsign8           FlashOptim's curve, c = rint(127 * 2|y| / (1 + |y|)), to nearest
    power p             c = 127 |y|^p, rounded; sqrt8 is p = 1/2; "searched": the best of POWERS for each group
    sqrt8 or softsign8  the better for each group, by the error of m or of m / sqrt(v); the sign bit of M could tell
    cell means, offset  sqrt8's codes decoded elsewhere in their cells; sqrt8's levels moved away from zero
    ratio p             not m but u = m / sqrt(v') in power p, v' as log8 stores v; m' = u' sqrt(v'): neighbours of very
                        different v share one scale well, since |u| is bounded whatever v is
    update p            the same with u = m / sqrt(v), which the step has computed; v's error then goes into m' and
                        leaves m' / sqrt(v') alone
v, on logarithmic grids:
    to nearest          log8 with maxima rounded to nearest
    exact, any step     without log8's piecewise linear logarithm; with any step in bits instead of a one-byte one
    n octaves           the grid ends n octaves below M, smaller values take its last level; "searched": the best n
                        for each group
    fourth root         c = rint(255 (v/M)^(1/4))

Legend: N groups of G = 128; groups are (1, N, G) FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.state_codes import (
    Code,
    best_per_group,
    maximum_first,
    maximum_second,
    product_first,
    product_second,
    rounding_bits,
)
from overcoat.formats.expansion import normalize, smallest_positive
from overcoat.formats.log8 import STEPS as LOG8_STEPS
from overcoat.formats.moments import (
    MOMENT_CODES,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    maximum_of_first,
)

POWERS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
# Octaves below its maximum that a searched logarithmic grid may span.
OCTAVES = range(2, 33)


# ---- m -------------------------------------------------------------------------------------------------


def _rounded(c: Tensor, m: Tensor, random: Tensor) -> Tensor:
    """c, whose sign is m's, rounded as sqrt8 does it: to 256ths, and what is half way between two codes up for every
    second value; below 16 stochastically; what is below the first code is zero."""
    is_odd = torch.arange(m.shape[-1], device=m.device) % 2 == 1
    even = ((random >> 24) & 0xFF).unsqueeze(-1) / 256
    added = torch.where(c < 16.0, torch.where(is_odd, 255 / 256 - even, even), torch.where(is_odd, 127 / 256, 0.5))
    rounded = torch.floor(torch.round(torch.copysign(c, m) * 256.0) / 256.0 + added).abs()
    return torch.where(c < 1.0, 0.0, rounded).clamp(max=127.0)


def power8(m: Tensor, power: float, random: Tensor | None = None) -> Tensor:
    """c = 127 |y|^power, rounded, 0 below 1; random: int32 (1, N), the groups' `rounding_bits` if None."""
    random = rounding_bits(m) if random is None else random
    amax = maximum_of_first(m, random)[1]
    root = _rounded(normalize(m.abs(), amax).pow(power) * 127.0, m, random) / 127.0
    return torch.copysign(root.pow(1.0 / power) * amax, m)


def softsign8(m: Tensor) -> Tensor:
    """FlashOptim's curve with sqrt8's metadata."""
    amax = maximum_first(m)
    y = normalize(m, amax)
    t = torch.round(2.0 * y / (1.0 + y.abs()) * 127.0).clamp(-127.0, 127.0) / 127.0
    return t / (2.0 - t.abs()) * amax


def sqrt8_mean(m: Tensor) -> Tensor:
    """sqrt8 decoded to the mean of its cell, (c^2 + 1/12) / 127^2: that of values whose roots are uniform in it."""
    amax = maximum_first(m)
    c = _rounded(normalize(m.abs(), amax).sqrt() * 127.0, m, rounding_bits(m))
    inner = (c > 0) & (c < 127)
    return torch.copysign((c.square() + torch.where(inner, 1.0 / 12.0, 0.0)) * (1.0 / 127.0**2) * amax, m)


def sqrt8_offset(m: Tensor, offset: float) -> Tensor:
    """sqrt8 with its levels moved away from zero: |y'| = ((c + offset) / (127 + offset))^2 for c > 0."""
    amax = maximum_first(m)
    top = 127.0 + offset
    c = _rounded(normalize(m.abs(), amax).sqrt() * top - offset, m, rounding_bits(m))
    return torch.copysign(torch.where(c > 0, ((c + offset) / top).square(), 0.0) * amax, m)


def better_of_two(m: Tensor, seen: Code) -> Tensor:
    """sqrt8 or softsign8 for each group, by the error that `seen` shows."""
    marks = torch.arange(2, device=m.device).view(2, 1, 1, 1)
    return best_per_group(m, ((marks[0], product_first(m, "sqrt8")), (marks[1], softsign8(m))), seen)[0]


def searched_power(m: Tensor, seen: Code) -> Tensor:
    """`power8` with the best of POWERS for each group."""
    marks = torch.arange(len(POWERS), device=m.device).view(-1, 1, 1, 1)
    return best_per_group(m, ((mark, power8(m, power)) for mark, power in zip(marks, POWERS, strict=True)), seen)[0]


def ratio8(m: Tensor, v: Tensor, stored_v: Tensor, power: float) -> Tensor:
    """m from a code of m / sqrt(v): m' = power8(m / sqrt(v)) sqrt(v'), v' = `stored_v`; v may be v' too."""
    root = v.sqrt()
    # Bits of the quotients themselves would be others on a device whose quotients differ in the last place.
    return power8(torch.where(root > 0, m / root, 0.0), power, rounding_bits(m)) * stored_v.sqrt()


# ---- v -------------------------------------------------------------------------------------------------


def log_grid(v: Tensor, octaves: float = torch.inf) -> Tensor:
    """255 levels at exactly equal ratios from M down to mu, or to M 2^-octaves where mu is below that."""
    amax = maximum_second(v)
    span = torch.log2(amax / smallest_positive(v)).clamp(2.0**-10, octaves)
    span = torch.where(amax > 0, span, 1.0)
    distance = torch.log2(torch.where(v > 0, amax / v, 1.0)).clamp(min=0.0)
    level = torch.round((distance / span).clamp(max=1.0) * LOG8_STEPS)
    return torch.where(v > 0, amax * torch.exp2(level * (-span / LOG8_STEPS)), 0.0)


def log8_any_step(v: Tensor) -> Tensor:
    """log8 with the smallest step S in bits that spans the group, not only those that fit into one byte."""
    bits = maximum_second(v).view(torch.int32)
    span = (bits - smallest_positive(v).view(torch.int32)).clamp(min=0)
    step = ((span + (LOG8_STEPS - 1)) // LOG8_STEPS).clamp(min=1).double()
    level = torch.round((bits - v.view(torch.int32)) / step).clamp(0, LOG8_STEPS)
    return torch.where(v > 0, (bits - (level * step).int()).view(torch.float32), 0.0)


def fourth_root8(v: Tensor) -> Tensor:
    """c = rint(255 (v / M)^(1/4)), at least 1 where v > 0."""
    amax = maximum_second(v)
    c = torch.round(normalize(v, amax).sqrt().sqrt() * 255.0).clamp(max=255.0)
    c = torch.where((v > 0) & (c == 0), 1.0, c)
    return (c / 255.0).square().square() * amax


def searched_log_grid(v: Tensor, seen: Code) -> Tensor:
    """`log_grid` with the best number of OCTAVES for each group."""
    candidates = (torch.full((1, 1, 1), octaves, dtype=torch.int32, device=v.device) for octaves in OCTAVES)
    return best_per_group(v, ((octaves, log_grid(v, float(octaves))) for octaves in candidates), seen)[0]


# ---- all of them ---------------------------------------------------------------------------------------


def vary_first(m: Tensor, v: Tensor, seen: Code) -> dict[str, Tensor]:
    """m after each variation of sqrt8, by name; `seen`: m' -> m' / sqrt(v)."""
    stored_v = product_second(v, "log8")
    return {
        "sqrt8, to nearest": decode_first(encode_first(m, MOMENT_CODES["sqrt8"]), MOMENT_CODES["sqrt8"]),
        "softsign8": softsign8(m),
        "power 0.4": power8(m, 0.4),
        "power 0.6": power8(m, 0.6),
        "power, searched": searched_power(m, seen),
        "sqrt8 or softsign8, by m": better_of_two(m, lambda x: x),
        "sqrt8 or softsign8, by m/sqrt(v)": better_of_two(m, seen),
        "sqrt8, cell means": sqrt8_mean(m),
        "sqrt8, offset 1/4": sqrt8_offset(m, 0.25),
        "sqrt8, offset -1/4": sqrt8_offset(m, -0.25),
        **{f"ratio {power}": ratio8(m, stored_v, stored_v, power) for power in (0.5, 0.7, 1.0)},
        **{f"update {power}": ratio8(m, v, stored_v, power) for power in (0.5, 0.7, 1.0)},
    }


def vary_second(v: Tensor, seen: Code) -> dict[str, Tensor]:
    """v after each variation of log8, by name; `seen`: v' -> m / sqrt(v')."""
    return {
        "log8, to nearest": decode_second(encode_second(v, MOMENT_CODES["log8"]), MOMENT_CODES["log8"]),
        "log8, exact": log_grid(v),
        "log8, any step": log8_any_step(v),
        "log8, 16 octaves": log_grid(v, 16.0),
        "log8, 10 octaves": log_grid(v, 10.0),
        "log8, searched": searched_log_grid(v, seen),
        "fourth root": fourth_root8(v),
    }
