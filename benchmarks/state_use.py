"""How codes use their range on AdamW states: dynamic range, k, and how often each code occurs.

The counts behind the paper's Figures 2 and 3. Groups of zeros are left out, and so are elements that are zero.

Legend: N groups of 128; groups are (1, N, 128) FP32, padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.state_codes import maximum_first, maximum_second, rounding_bits, rule_exponents, searched_exponent
from overcoat.formats import E4M3
from overcoat.formats.expansion import exponent_value, reference_log2, smallest_positive
from overcoat.formats.moments import MOMENT_CODES, encode_first, encode_second

OCTAVE_BINS = 128  # of half an octave
CODE_NAMES = {"m": ("e4m3", "e4m3x", "sqrt8"), "v": ("e4m3", "e4m3x", "log8")}


def _count(values: Tensor, bins: int) -> Tensor:
    """How often each of 0..bins-1 occurs, int64; larger values count as the last."""
    return torch.bincount(values.flatten().long().clamp(max=bins - 1), minlength=bins)


def count_use(m: Tensor, v: Tensor, eps: float) -> dict[str, Tensor]:
    """Histograms, int64, additive over groups, by name with the moment before a slash:

    octaves, octaves expanded: of log2(M/mu) in bins of 1/2, before and after expansion for E4M3; exponents: of the
    rule's k16; exponents searched: of the one with the least error of m / sqrt(v); a code's name: of its codes (m:
    magnitudes) over elements that are not zero.
    """
    counts: dict[str, Tensor] = {}
    inverse = 1.0 / (v.sqrt() + eps)
    seen: dict[str, Callable[[Tensor], Tensor]] = {"m": lambda x: x * inverse, "v": lambda x: m / (x.sqrt() + eps)}
    maxima = {"m": maximum_first(m), "v": maximum_second(v)}
    for key, x, rule in zip(("m", "v"), (m, v), rule_exponents(m, v), strict=True):
        amax, smallest = maxima[key], smallest_positive(x)
        used = amax > 0
        octaves = (reference_log2(amax) - torch.log2(smallest)).clamp(min=0.0)
        counts[f"{key}/octaves"] = _count(2 * octaves[used], OCTAVE_BINS)
        counts[f"{key}/octaves expanded"] = _count(2 * (octaves * exponent_value(rule))[used], OCTAVE_BINS)
        counts[f"{key}/exponents"] = _count(rule[used], 256)
        searched = searched_exponent(x, amax, rule, key == "v", seen[key])[1]
        counts[f"{key}/exponents searched"] = _count(searched[used], 256)
        for name in CODE_NAMES[key]:
            encode = encode_first if key == "m" else encode_second
            encoded = encode(x, MOMENT_CODES[name], rounding_bits(x)).codes
            counts[f"{key}/{name}"] = _count(magnitude_code(encoded)[x != 0], 256 if name == "log8" else 128)
    return counts


def magnitude_code(codes: Tensor) -> Tensor:
    """0..127 for |value| of an E4M3 or INT8 code, ascending; an unsigned code as it is."""
    if codes.dtype == torch.int8:
        return codes.abs()
    return codes.view(torch.uint8) & 0x7F if codes.dtype == E4M3.dtype else codes


def entropy(counts: Tensor) -> float:
    """Bits that a histogram's values carry: log2 of how many codes, equally used, would say as much."""
    share = counts[counts > 0].double() / counts.sum()
    return float(-(share * share.log2()).sum())


def median(counts: Tensor) -> int:
    """The bin that holds the median."""
    return int((counts.cumsum(0) * 2 >= counts.sum()).int().argmax())


def use_table(counts: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Figures of a result row from the histograms of each type.

    Returns:
        histograms, pooled; medians by type of octaves and k (the rule's, the searched one); entropy in bits of each
        code, pooled (the sign of m, one bit more, left out).
    """
    names = list(next(iter(counts.values())))
    pooled = {name: torch.stack([part[name] for part in counts.values()]).sum(0) for name in names}
    medians = {
        kind: {
            f"{key} {title}": round(scale * median(part[f"{key}/{name}"]), 4)
            for key in ("m", "v")
            for title, name, scale in (
                ("octaves", "octaves", 0.5),
                ("k", "exponents", 1 / 16),
                ("k searched", "exponents searched", 1 / 16),
            )
        }
        for kind, part in {**counts, "all": pooled}.items()
    }
    return {
        "histograms": {name: value.tolist() for name, value in pooled.items()},
        "medians": medians,
        "entropy": {
            f"{key}/{name}": round(entropy(pooled[f"{key}/{name}"]), 3)
            for key in CODE_NAMES
            for name in CODE_NAMES[key]
        },
    }
