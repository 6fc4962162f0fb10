"""How AdamW's two moments are stored: 8-bit codes per group of 128, a maximum, and one byte that shapes the code.

Every code works on values normalized by the maximum M of their group, y = x / M. M is rounded for storage first, and
the *stored* M normalizes, so encoder and decoder agree. Only the float codes of m use the exact M, so that the
maximum's code is 1 and its decoded value is unbiased. In a step M is rounded stochastically, with the random numbers of
`masters`. Rounded to nearest, a moving average stops when its step is below half a unit: for a constant gradient m in
BF16 would stop up to 2^-8 / (1 - beta1) = 4% short, v in 24 bits 1.5% with beta2 = 0.999.

    e4m3 e5m2   c = cast(F_max y)                       y' = c / F_max                    (COAT, Table 1)
    de8         c = nearest value of the 8-bit tree     y' = table[c]                     (COAT, Table 8)
    ...x        the same on sign(y) |y|^k               y' = sign |.|^(1/k)               `expansion`
    sqrt8       c = floor(sign(x) sqrt(|x|) 127/sqrt(M) + r)   x' = M c |c| / 127^2
    ratio8      m only: sqrt8 of u = m / sqrt(v)               m' = u' sqrt(v)
    log8        v only: 255 levels, equal steps of "bit distance" to M, and one code for exact zero: `log8`
    bf16 fp32   the plain tensor, no groups

The pair ("ratio8", "log8") is named "8bit" and is the default: on the states of a trained model its error of m /
sqrt(v) is 3.5 to 5.4 times below the paper's pair, "fp8" = ("e4m3x", "e4m3x"), with the same bytes
(docs/research/optimizer-states.md). Before, "8bit" was ("sqrt8", "log8").

**ratio8.** M is the maximum of |u|, and v is decoded from log8, for encoding as for decoding. |u| is at most (1 -
beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)), 7.3 with the usual betas, and 1 for steady gradients, whatever the
scale of a weight's gradients. So a weight with small gradients keeps its precision in a group with an outlier. With
sqrt8 an m below M / 16129 is zero after every step. r is as in sqrt8, with the limit `dithered_code`. Small values are
not set to zero, since the first code moves a weight by lr M / 16129 only.

**sqrt8.** r is 1/2, round to nearest, except for small codes of m. When m decays by beta1 = 0.9 its root decays by
0.95, and codes up to 9 round back to themselves. So the m of a weight whose gradient stops, or is rare, would stay at
up to M / 200 while its v goes to zero, and the weight would drift. Therefore rounding is stochastic below code 16 (M /
63): r is one random byte per group, in 256ths, and 255/256 - r for every second element; each is right in the mean.
Values below the first code, M / 16129, become zero: rounded up, m would be too large for its v.

**Metadata.** m: M in BF16, and k16 in uint8 if the code is expanded. v: one int32 per group, M's top 24 bits above the
shape byte. v needs 24 bits: with beta2 = 0.999 its maximum moves by 2^-10 a step, less than BF16's spacing of 2^-8. m
moves by 10% a step, so BF16 is enough. Bytes per parameter, both moments, groups of 128: "8bit" 2 + 6/128 = 2.047;
"fp8" 2 + 7/128 = 2.055.

Legend: R rows, n groups of a row, G group size; groups are (R, n, G) FP32, padded with zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.formats import de8, log8
from overcoat.formats.expansion import (
    FORMAT_RANGE_LOG2,
    contract,
    expand,
    exponent_of_range,
    normalize,
    smallest_positive,
)
from overcoat.formats.float8 import FLOAT8, cast_float8, decode_float8
from overcoat.kernels.hardware import fma, reciprocal, rsqrt, sqrt

# The largest BF16 as FP32 bits.
BFLOAT16_MAX = 0x7F7F0000
FLOAT32_TINY = torch.finfo(torch.float32).tiny
# The largest finite FP32 with its 8 low bits clear, as bits: v's stored maximum never rounds up to inf.
PACKED_MAX = 0x7F7FFF00
# 1.5 * 2^15: adding it puts 256ths in the lowest byte and the floor in the second. Adding 1/2 as well rounds to
# nearest, but ties go up, a bias of 1/512: so m adds 1/2 and 127/256 in turn.
FIXED = 49152.0
SQRT8_SMALLEST = (1 / 127) ** 2  # share of M: smaller values become zero
SQRT8_DITHERED = (16 / 127) ** 2  # share of M: smaller values are rounded stochastically
LARGEST_INVERSE = 2.0**63  # 1 / sqrt(v) of the smallest normal v


@dataclass(frozen=True)
class MomentCode:
    """One way to store a moment.

    Attributes:
        name: as users write it, for example "e4m3x".
        base: the code without expansion: "e4m3", "e5m2", "de8", "sqrt8", "ratio8", "log8", "bf16" or "fp32".
        expanded: apply dynamic range expansion before the base code.
        dtype: of the stored codes.
    """

    name: str
    base: str
    expanded: bool
    dtype: torch.dtype

    @property
    def grouped(self) -> bool:
        """True if groups and their maxima are needed: not for "bf16" and "fp32"."""
        return self.base not in ("bf16", "fp32")


MOMENT_CODES = {
    code.name: code
    for code in (
        MomentCode("e4m3", "e4m3", False, torch.float8_e4m3fn),
        MomentCode("e5m2", "e5m2", False, torch.float8_e5m2),
        MomentCode("de8", "de8", False, torch.uint8),
        MomentCode("sqrt8", "sqrt8", False, torch.int8),
        MomentCode("ratio8", "ratio8", False, torch.int8),
        MomentCode("log8", "log8", False, torch.uint8),
        MomentCode("bf16", "bf16", False, torch.bfloat16),
        MomentCode("fp32", "fp32", False, torch.float32),
        MomentCode("e4m3x", "e4m3", True, torch.float8_e4m3fn),
        MomentCode("e5m2x", "e5m2", True, torch.float8_e5m2),
        MomentCode("de8x", "de8", True, torch.uint8),
    )
}

# Names of pairs (code of m, code of v).
MOMENTS = {"8bit": ("ratio8", "log8"), "fp8": ("e4m3x", "e4m3x"), "bf16": ("bf16", "bf16"), "fp32": ("fp32", "fp32")}
# What "8bit" meant before ratio8: states saved with it are continued with it.
EARLIER_8BIT = ("sqrt8", "log8")


def resolve_moments(moments: str | tuple[str, str]) -> tuple[str, str]:
    """Return the pair of code names (m, v) for `moments`. ValueError: an unknown name or an impossible pair."""
    if isinstance(moments, str):
        if moments not in MOMENTS:
            raise ValueError(
                f"unknown moments {moments!r}; choose one of {', '.join(MOMENTS)}, or a pair of codes (m, v) from "
                f"{', '.join(MOMENT_CODES)}"
            )
        return MOMENTS[moments]
    pair = tuple(moments)
    if len(pair) != 2 or any(code not in MOMENT_CODES for code in pair):
        raise ValueError(f"moments {moments!r} must be a pair of codes (m, v) from {', '.join(MOMENT_CODES)}")
    if pair[0] == "log8":
        raise ValueError('moments: "log8" has no sign, so it can store v but not m; use "ratio8" for m')
    if "ratio8" in pair and pair != ("ratio8", "log8"):
        raise ValueError(
            f'moments {pair!r}: "ratio8" stores m in units of sqrt(v) as "log8" has it; use ("ratio8", "log8")'
        )
    return pair[0], pair[1]


class Encoded(NamedTuple):
    """A stored moment: codes, and per group the maximum and the byte that shapes the code, where the code has them.

    m: amax is BF16 and shape uint8. v: amax is the packed int32 and holds the shape; the field `shape` is None.
    """

    codes: Tensor
    amax: Optional[Tensor] = None
    shape: Optional[Tensor] = None


# ---- the first moment ----------------------------------------------------------------------------------


def encode_first(
    groups: Tensor,
    code: MomentCode,
    random: Optional[Tensor] = None,
    second: Optional[Encoded] = None,
    beta: float = 0.9,
) -> Encoded:
    """Encode m: codes (R, n, G), amax (R, n) BF16, shape (R, n) uint8 or None.

    random: `masters.group_bits`, int32 (R, n), to round the maximum and small codes of sqrt8 and ratio8 stochastically;
        None rounds them to nearest.
    second: v, already encoded, for ratio8; beta: beta1, for ratio8.
    """
    if not code.grouped:
        return Encoded(groups.to(code.dtype))
    if code.base == "ratio8":
        # Where v is denormal, 1 / sqrt(v) may be inf.
        groups = groups * rsqrt(_level_values(second)).clamp(max=LARGEST_INVERSE)
    # The maximum of each group, made finite: exact, and as stored.
    bits = _maximum(groups.abs()).view(torch.int32).clamp(max=BFLOAT16_MAX)
    rounded = bits + (0x8000 if random is None else random.unsqueeze(-1) & 0xFFFF)
    exact, stored = bits.view(torch.float32), (rounded & ~0xFFFF).view(torch.float32)
    amax = stored.bfloat16()
    if code.base == "sqrt8":
        groups = torch.where(groups.abs() < stored * SQRT8_SMALLEST, 0.0, groups)
        return Encoded(_encode_first_sqrt8(groups, stored, random, SQRT8_DITHERED), amax.squeeze(-1))
    if code.base == "ratio8":
        return Encoded(_encode_first_sqrt8(groups, stored, random, dithered_below(beta)), amax.squeeze(-1))
    shape = None
    if code.expanded:
        shape = exponent_of_range(exact, smallest_positive(groups), range_log2(code.base, signed=True))
        y = expand(groups, exact, shape)
    else:
        y = normalize(groups, exact)
    codes = _encode_unit(y, code.base, signed=True)
    return Encoded(codes, amax.squeeze(-1), None if shape is None else shape.squeeze(-1))


def _maximum(groups: Tensor) -> Tensor:
    """Return the maximum of values >= 0, (R, n, 1); NaN is ignored, as in the kernel."""
    return torch.where(groups.isnan(), 0.0, groups).amax(-1, keepdim=True)


def decode_first(moment: Encoded, code: MomentCode, second: Optional[Encoded] = None) -> Tensor:
    """Decode m to FP32 groups (R, n, G). second: v as stored, for ratio8."""
    return _decode(moment, code, True, second)


def _level_values(second: Optional[Encoded]) -> Tensor:
    """Return v as log8 decodes it, FP32 (R, n, G), with code 0 at least 0 (`log8.level_value`)."""
    assert second is not None
    assert second.amax is not None, "ratio8 needs v in log8"
    packed = second.amax.unsqueeze(-1)
    return log8.level_value(second.codes, packed & ~0xFF, packed & 0xFF)


def dithered_code(beta: float) -> float:
    """Return the code below which ratio8 rounds stochastically: 31 for beta = 0.9, 63 for 0.95, 125 for 0.99.

    A code c decays to sqrt(beta) c; rounded to nearest, codes below 0.5 / (1 - sqrt(beta)) would not change. The limit
    is three times that: an alternating gradient has |u| = 0.05, code 29 next to a steady one, and rounded to nearest it
    would not average to zero. The largest code is never rounded up.
    """
    return min(125.0, 1.6 / (1.0 - math.sqrt(beta)))


def dithered_below(beta: float) -> float:
    """Return `dithered_code` as a share of M."""
    return (dithered_code(beta) / 127) ** 2


# ---- the second moment ---------------------------------------------------------------------------------


def encode_second(
    groups: Tensor, code: MomentCode, random: Optional[Tensor] = None, phase: Optional[Tensor] = None
) -> Encoded:
    """Encode v >= 0: codes (R, n, G), amax (R, n) int32 = top 24 bits of FP32 M | shape byte. v > 0 is never 0.

    random: as for `encode_first`; other bits of the same numbers are used.
    phase: `masters.phase_bits`, int32 (R, n), to round log8's codes stochastically; None rounds them to nearest.
    """
    if not code.grouped:
        return Encoded(_never_zero(groups.to(code.dtype), groups))
    bits = packed_maximum(_maximum(groups), None if random is None else random.unsqueeze(-1) >> 16)
    smallest = smallest_positive(groups)
    if code.base == "log8":
        bits = torch.where(bits < log8.FLOOR, 0, bits)
        codes, shape = log8.encode(groups, bits, smallest, None if phase is None else phase.unsqueeze(-1))
        return Encoded(codes, (bits | shape).squeeze(-1))
    stored = bits.view(torch.float32)
    if code.base == "sqrt8":
        nearest = groups.new_full((), FIXED + 0.5)
        codes = _encode_sqrt8(torch.minimum(groups, stored), stored, nearest)
        return Encoded(_never_zero(codes, groups), bits.squeeze(-1))
    shape = torch.zeros_like(bits)
    if code.expanded:
        exponent = exponent_of_range(stored, smallest, range_log2(code.base, signed=False))
        y = expand(groups, stored, exponent)
        shape = exponent.int()
    else:
        y = normalize(groups, stored)
    codes = _never_zero(_encode_unit(y, code.base, signed=False), groups)
    return Encoded(codes, (bits | shape).squeeze(-1))


def decode_second(moment: Encoded, code: MomentCode) -> Tensor:
    """Decode v to FP32 groups (R, n, G)."""
    if code.base == "log8" and moment.amax is not None:
        packed = moment.amax.unsqueeze(-1)
        return log8.decode(moment.codes, packed & ~0xFF, packed & 0xFF)
    return _decode(moment, code, False, None)


def packed_maximum(amax: Tensor, random: Optional[Tensor] = None) -> Tensor:
    """Return the bits (int32) of M >= 0 rounded to the top 24; a positive M stays positive, and the result finite.

    random: int32, whose low 8 bits round stochastically; None rounds to nearest.
    """
    bits = amax.view(torch.int32)
    added = bits.clamp(max=PACKED_MAX) + (0x80 if random is None else random & 0xFF)
    return torch.where(bits > 0, added.clamp(min=0x100), 0).clamp(max=PACKED_MAX) & ~0xFF


def _encode_sqrt8(x: Tensor, amax: Tensor, addend: Tensor) -> Tensor:
    """Return sqrt8 codes int8 of x; addend: FIXED + r."""
    # 1 / sqrt(M) does not overflow. A denormal maximum counts as zero, and so does its group. For others, M's rounding
    # raises |x| / M by less than 2^-7, so the root is 127.4951 at most and still rounds to 127.
    factor = torch.where(amax >= FLOAT32_TINY, reciprocal(sqrt(amax)) * 127.0, 0.0)
    fixed = fma(torch.copysign(sqrt(x.abs()), x), factor, addend)
    return fixed.view(torch.int8)[..., 1::4].contiguous()


def _encode_first_sqrt8(x: Tensor, amax: Tensor, random: Optional[Tensor], dithered_below: float) -> Tensor:
    """Return sqrt8 codes of m. random: as for `encode_first`; r is its highest byte where |x| < M dithered_below."""
    is_odd = torch.arange(x.shape[-1], device=x.device) % 2 == 1
    # Adding 1/2 rounds ties up, a bias of 1/512: every second element adds 127/256 instead.
    addend = FIXED + torch.where(is_odd, x.new_full((), 127 / 256), 0.5)
    if random is not None:
        even = ((random >> 24) & 0xFF).unsqueeze(-1).float() * 2.0**-8
        dithered = FIXED + torch.where(is_odd, 255 / 256 - even, even)
        addend = torch.where(x.abs() < amax * dithered_below, dithered, addend)
    return _encode_sqrt8(x, amax, addend)


# ---- codes of the unit interval ------------------------------------------------------------------------


def range_log2(base: str, signed: bool) -> float:
    """Return log2 of the base code's dynamic range."""
    return FORMAT_RANGE_LOG2[base] if base in FORMAT_RANGE_LOG2 else -math.log2(de8.smallest_magnitude(signed))


def decay(
    moment: Encoded, code: MomentCode, beta: float, addend: Tensor, signed: bool, second: Optional[Encoded] = None
) -> Tensor:
    """Return beta x + addend, FP32 (R, n, G), rounded once, of a stored moment x.

    signed: True for m, False for v. second: v as stored, for ratio8.

    beta is multiplied into the group's maximum. sqrt8 then divides by 127^2, which is denormal for maxima below 2e-34:
    there the result is less exact than FP32, by up to a thousandth at 1e-38.
    """
    factor = addend.new_full((), beta)
    if moment.amax is None or code.base == "log8":
        return fma(decode_second(moment, code), factor, addend)
    z, unit, amax = _normalized(moment, moment.amax, code, signed, second)
    return fma(z, (amax * factor) * unit, addend)


def _decode(moment: Encoded, code: MomentCode, signed: bool, second: Optional[Encoded]) -> Tensor:
    if moment.amax is None:
        return moment.codes.float()
    z, unit, amax = _normalized(moment, moment.amax, code, signed, second)
    return (z * unit) * amax


def _normalized(
    moment: Encoded, packed: Tensor, code: MomentCode, signed: bool, second: Optional[Encoded]
) -> tuple[Tensor, float, Tensor]:
    """Return (z, unit, M) with x / M = z * unit: z FP32 (R, n, G), unit a number, M FP32 (R, n, 1)."""
    amax = packed.float() if signed else (packed & ~0xFF).view(torch.float32)
    if code.base in ("sqrt8", "ratio8"):
        root = moment.codes.float()
        z = root * root.abs()
        return z if code.base == "sqrt8" else z * sqrt(_level_values(second)), 1 / 127**2, amax.unsqueeze(-1)
    z = _decode_unit(moment.codes, code.base, signed)
    if code.expanded:
        shape = moment.shape if moment.shape is not None else packed & 0xFF
        z = contract(z, shape.unsqueeze(-1))
    return z, 1.0, amax.unsqueeze(-1)


def _encode_unit(y: Tensor, base: str, signed: bool) -> Tensor:
    if base in FLOAT8:
        return cast_float8(y * FLOAT8[base].max, FLOAT8[base])
    return de8.encode(y, signed)


def _decode_unit(codes: Tensor, base: str, signed: bool) -> Tensor:
    if base in FLOAT8:
        return decode_float8(codes) * (1.0 / FLOAT8[base].max)
    return de8.decode(codes, signed)


def _never_zero(codes: Tensor, groups: Tensor) -> Tensor:
    """Replace codes of v > 0 that were rounded to zero by the smallest positive code: in every code bit pattern 1."""
    if codes.dtype == torch.float32:
        return codes
    pattern = codes.view(torch.int16 if codes.dtype == torch.bfloat16 else torch.uint8)
    return torch.where((groups > 0) & (pattern == 0), torch.ones_like(pattern), pattern).view(codes.dtype)
