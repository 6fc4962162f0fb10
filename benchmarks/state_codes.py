"""Every code of AdamW's moments that `benchmarks.states` compares: decode(encode(x)) on groups of 128.

The product's own codes run as the optimizer runs them (`overcoat.formats.moments`), maxima and small codes rounded up
or down by chance. Others are rounded so where they share that; those that exist here alone:

    flash32, flash128   FlashOptim (arXiv 2602.23349) 0.1.4, groups of 32, as published, or of 128, FP16 maximum M
                        m: softsign, c = floor(127 t + 1/2), t = 2y / (1 + |y|), y = m/M    y' = t' / (2 - |t'|)
                        v: linear in r = sqrt(v), M its maximum, c = floor(255 r/M + 1/2)   v' = (c M / 255)^2
    flashoptim          the same by the functions of the installed package: needs it, and a GPU
    sqrt8/32, log8/32   the product's "8bit" at FlashOptim's group size
    exact               the moment as it is, to see the error of the other one alone
    e4m3k, e4m3kr       E4M3 with expansion, k of each group found by search: the least error of the moment itself
                        (for v of its root), or of m / sqrt(v)

Legend: N groups of G = 128; groups are (1, N, G) FP32, padded with zeros.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overcoat.formats import E4M3, cast_float8
from overcoat.formats.expansion import contract, expand, exponent_of_range, smallest_positive
from overcoat.formats.masters import mix
from overcoat.formats.moments import (
    MOMENT_CODES,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    maximum_of_first,
    packed_maximum,
    range_log2,
)

GROUP_SIZE = 128
FLASH_GROUP_SIZE = 32
EXACT = "exact"
# FlashOptim's floor of a group's maximum.
FLASH_FLOOR = 1e-12
# k in sixteenths that the search tries beside the rule's own.
EXPONENTS = range(4, 256, 2)

Code = Callable[[Tensor], Tensor]


def regrouped(x: Tensor, group_size: int, code: Code) -> Tensor:
    """Apply `code` to x, (1, N, 128), cut into groups of `group_size`, a divisor of 128."""
    return code(x.view(1, -1, group_size)).view(x.shape)


# ---- the product's codes -------------------------------------------------------------------------------


def rounding_bits(x: Tensor) -> Tensor:
    """32 random bits for each group, int32 (1, N), in place of the step's `masters.group_bits`.

    A hash of what the group holds, so no figure depends on how states are cut into chunks.
    """
    return mix(x.view(torch.int32).sum(-1, dtype=torch.int32))


def product_first(m: Tensor, name: str) -> Tensor:
    """m after storage in a code of `overcoat.formats.moments`, rounded as a step rounds it, in groups of any size."""
    return decode_first(encode_first(m, MOMENT_CODES[name], rounding_bits(m)), MOMENT_CODES[name])


def product_second(v: Tensor, name: str) -> Tensor:
    """v after storage in a code of `overcoat.formats.moments`, rounded as a step rounds it, in groups of any size."""
    return decode_second(encode_second(v, MOMENT_CODES[name], rounding_bits(v)), MOMENT_CODES[name])


def maximum_first(m: Tensor) -> Tensor:
    """The maximum of each group as a step stores it for m, (1, N, 1)."""
    return maximum_of_first(m, rounding_bits(m))[1]


def maximum_second(v: Tensor) -> Tensor:
    """The maximum of each group as a step stores it for v, (1, N, 1)."""
    return packed_maximum(v.amax(-1, keepdim=True), rounding_bits(v).unsqueeze(-1) >> 16).view(torch.float32)


# ---- FlashOptim ----------------------------------------------------------------------------------------


def flash_first(m: Tensor) -> Tensor:
    """m after FlashOptim's softsign code, one FP16 maximum for each group of the last axis."""
    amax = m.abs().amax(-1, keepdim=True).clamp(min=FLASH_FLOOR)
    y = m / amax
    t = torch.floor(2.0 * y / (1.0 + y.abs()) * 127.0 + 0.5) / 127.0
    return t / (2.0 - t.abs()) * amax.half().float()


def flash_second(v: Tensor) -> Tensor:
    """v after FlashOptim's linear code of sqrt(v); small v become 0."""
    root = v.sqrt()
    amax = root.amax(-1, keepdim=True).clamp(min=FLASH_FLOOR)
    return (torch.floor(root / amax * 255.0 + 0.5) / 255.0 * amax.half().float()).square()


def installed_flashoptim(device: torch.device) -> Any | None:
    """FlashOptim's module of quantizers; None where it is not installed, and for a CPU, whose memory its Triton kernels
    cannot read."""
    if device.type != "cuda":
        return None
    try:
        return importlib.import_module("flashoptim.optimizers")
    except ImportError:
        return None


def _installed(flashoptim: Any, options: dict[str, bool], x: Tensor) -> Tensor:
    codes, scales = flashoptim.quantize(x.contiguous(), **options)
    return flashoptim.dequantize(codes, scales, **options)


# ---- one choice per group, by error --------------------------------------------------------------------


def best_per_group(x: Tensor, decoded: Iterable[tuple[Tensor, Tensor]], seen: Code) -> tuple[Tensor, Tensor]:
    """For each group the candidate with the least sum of (seen(x') - seen(x))^2.

    Args:
        x: (1, N, G).
        decoded: candidates, each a pair: its parameter, integers that broadcast to (1, N, 1), and x', (1, N, G).
        seen: how an error counts: the identity, a root, or m / sqrt(v) with the other moment given.

    Returns:
        The best x', (1, N, G), and the parameters chosen, int32 (1, N, 1).
    """
    target = seen(x)
    least = torch.full_like(x[..., :1], torch.inf)
    best, choice = torch.zeros_like(x), torch.zeros_like(x[..., :1], dtype=torch.int32)
    for parameter, candidate in decoded:
        error = (seen(candidate) - target).square().sum(-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, candidate, best)
        choice = torch.where(better, parameter.int(), choice)
    return best, choice


def expanded(x: Tensor, amax: Tensor, k16: Tensor, positive: bool) -> Tensor:
    """x after E4M3 with expansion by a given k: the product's "e4m3x" but for the choice of k.

    Args:
        x: (1, N, G). amax: (1, N, 1), as stored. k16: sixteenths, integers that broadcast to (1, N, 1).
        positive: x > 0 is never stored as 0, and the stored maximum encodes (v); else the exact one does (m).
    """
    encoding = amax if positive else maximum_of_first(x)[0]
    codes = cast_float8(expand(x, encoding, k16) * E4M3.max, E4M3).float()
    if positive:
        codes = torch.where((x > 0) & (codes == 0), E4M3.tiny, codes)
    return contract(codes * (1.0 / E4M3.max), k16) * amax


def searched_exponent(x: Tensor, amax: Tensor, rule: Tensor, positive: bool, seen: Code) -> tuple[Tensor, Tensor]:
    """(x', k16) of E4M3 with the best k of EXPONENTS and the rule's own, `rule`, (1, N, 1); see `best_per_group`."""
    candidates = (rule, *(torch.full_like(rule, k16) for k16 in EXPONENTS))
    return best_per_group(x, ((k16, expanded(x, amax, k16, positive)) for k16 in candidates), seen)


def rule_exponents(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k16 of the paper's rule for m and v, uint8 (1, N, 1)."""
    return (
        exponent_of_range(maximum_of_first(m)[0], smallest_positive(m), range_log2("e4m3", signed=True)),
        exponent_of_range(maximum_second(v), smallest_positive(v), range_log2("e4m3", signed=False)),
    )


class Codes(NamedTuple):
    """Codes of m and of v that need nothing but the moment itself, by name."""

    first: dict[str, Code]
    second: dict[str, Code]


def all_codes(device: torch.device) -> Codes:
    """Every code but the searched ones, for tensors on `device`; "flashoptim" only where it can run."""
    first: dict[str, Code] = {
        name: functools.partial(product_first, name=name)
        for name, code in MOMENT_CODES.items()
        if code.grouped and name != "log8"
    }
    second: dict[str, Code] = {
        name: functools.partial(product_second, name=name)
        for name, code in MOMENT_CODES.items()
        if code.grouped and name != "sqrt8"
    }
    first[EXACT] = second[EXACT] = torch.clone
    for size in (FLASH_GROUP_SIZE, GROUP_SIZE):
        first[f"flash{size}"] = functools.partial(regrouped, group_size=size, code=flash_first)
        second[f"flash{size}"] = functools.partial(regrouped, group_size=size, code=flash_second)
    first["sqrt8/32"] = functools.partial(regrouped, group_size=FLASH_GROUP_SIZE, code=first["sqrt8"])
    second["log8/32"] = functools.partial(regrouped, group_size=FLASH_GROUP_SIZE, code=second["log8"])
    flashoptim = installed_flashoptim(device)
    if flashoptim is not None:
        root = {"signed": False, "sqrt": True, "softsign": False}
        first["flashoptim"] = functools.partial(_installed, flashoptim, {"signed": True, "softsign": True})
        second["flashoptim"] = functools.partial(_installed, flashoptim, root)
    return Codes(first, second)
