"""Master weights in fewer bits: a BF16 parameter plus 0, 8 or 16 more bits (the remainder).

Training needs steps far below BF16's spacing (2^-8 of the value) to accumulate. The usual FP32 copy costs 4 bytes, but
the BF16 weight already holds half of its bits. FP32 bits are read as a sign and an integer magnitude, which increases
with the value across all exponents, zero and denormals included:

    "bf16+16"   bits = (p << 16) + r,  r int16     p = (bits + 2^15) >> 16: the nearest BF16;  exact FP32
    "bf16+8"    bits = (p << 16) + (r << 8), int8  the top 24 bits of FP32: 2^8 levels between adjacent BF16 values
    "bf16"      bits = p << 16                     nothing extra
    "fp32"      the parameter itself is FP32

"bf16+8" and "bf16" round *stochastically*: a uniform random number below one unit of the last stored place is added
before truncation, so the expected value is exact and steps of any size accumulate (round to nearest would lose every
step below half a unit: for a weight of 1.0, every learning rate below 2^-17). The random numbers are a hash of (seed,
parameter, step, position of the element in the unsharded parameter); two or four consecutive elements share one of 32
bits. The same seed gives the same result on any device, for any sharding and after any resume.

All functions work on FP32 values or int32 bit patterns of any shape. NaN and inf survive encoding and decoding; inf
that is assigned to the parameter while its remainder is stale decodes to NaN or to the largest finite value.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

MASTERS = ("auto", "bf16+8", "bf16+16", "bf16")
# dtype of the remainder stored beside a BF16 parameter.
REMAINDER_DTYPE = {"bf16+8": torch.int8, "bf16+16": torch.int16, "bf16": None, "fp32": None}
# Random bits per element that rounding uses.
RANDOM_BITS = {"bf16+8": 8, "bf16+16": 0, "bf16": 16, "fp32": 0}

# 2^32 / golden ratio, 0x9E3779B9, as int32: its multiples modulo 2^32 are spread evenly.
GOLDEN = -1640531527
# 2^32 * (sqrt(2) - 1), 0x6A09E667, likewise.
SILVER = 1779033703
_NAN = 0x7FC00000


def resolve_master(master: str, dtype: torch.dtype) -> str:
    """Return the master of a parameter of `dtype`: "fp32" for FP32. ValueError: an unknown master, another dtype."""
    if master not in MASTERS:
        raise ValueError(f"unknown master {master!r}; choose one of {', '.join(MASTERS)}")
    if dtype == torch.float32:
        return "fp32"
    if dtype == torch.bfloat16:
        return "bf16+8" if master == "auto" else master
    raise ValueError(
        f"parameters of {dtype} cannot be trained by overcoat.AdamW; convert the model to bfloat16 or float32"
    )


def decode_master(param: Tensor, remainder: Optional[Tensor]) -> Tensor:
    """Return the FP32 value of a parameter and its remainder.

    A remainder that would make the magnitude negative is stale (the weight was assigned): the result is then 0.
    """
    if remainder is None:
        return param.float()
    bits = param.float().view(torch.int32)
    size = (bits & 0x7FFFFFFF) + (remainder.int() << (8 if remainder.dtype == torch.int8 else 0))
    return (size.clamp(min=0) | (bits & -0x80000000)).view(torch.float32)


def encode_master(value: Tensor, master: str, random: Optional[Tensor] = None) -> tuple[Tensor, Optional[Tensor]]:
    """Split an FP32 value, the updated weight, into the parameter and its remainder (or None), both in its shape.

    random: int32 in [0, 2^RANDOM_BITS), for masters that round stochastically. ValueError: they get none.
    """
    if master == "fp32":
        return value, None
    # A GPU's NaN, 0x7FFFFFFF, would wrap around to zero. No other NaN has low bits set here.
    bits = value.view(torch.int32).clamp(max=_NAN)
    if master == "bf16+16":
        return _bfloat16(bits + 0x8000), bits.to(torch.int16)  # the low half, read as signed, is the difference
    if random is None:
        raise ValueError(f"master {master!r} rounds stochastically; pass `random`")
    bits = bits + random
    if master == "bf16":
        return _bfloat16(bits), None
    return _bfloat16(bits + 0x8000), (bits >> 8).to(torch.int8)


def _bfloat16(bits: Tensor) -> Tensor:
    """Return the BF16 in the upper half of FP32 bits."""
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def _wrap(constant: int) -> int:
    """Return a 32-bit constant as signed, as int32 tensors need it."""
    return constant - (1 << 32) if constant >= 1 << 31 else constant


def _shift_right(x: Tensor, places: int) -> Tensor:
    """Shift int32 right, logically."""
    return (x >> places) & ((1 << (32 - places)) - 1)


def mix(x: Tensor) -> Tensor:
    """Hash int32 numbers: 32 bits, full avalanche (the "lowbias32" constants)."""
    x = (x ^ _shift_right(x, 16)) * _wrap(0x7FEB352D)
    x = (x ^ _shift_right(x, 15)) * _wrap(0x846CA68B)
    return x ^ _shift_right(x, 16)


def parameter_key(seed: int, index: int) -> int:
    """Return a signed 32-bit key for (seed, index of the parameter in the optimizer)."""
    x = (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return _wrap((x ^ (x >> 31)) >> 32)


def group_bits(key: int | Tensor, step: Tensor, group: Tensor) -> Tensor:
    """Return 32 random bits for each group, int32.

    key: `parameter_key`; step: the current step, 0-d; group: numbers of groups in the unsharded parameter, int32 of any
    shape, which key and step may have too.
    """
    return mix(mix(key + step.to(torch.int32) * GOLDEN) ^ group)


def phase_bits(key: int | Tensor, step: Tensor, group: Tensor) -> Tensor:
    """Return 32 bits for each group, int32, that advance by the golden ratio with each step; arguments of `group_bits`.

    Their upper bits are spread evenly over consecutive steps, so that errors of a slow average cancel within a few.
    """
    return key + step.to(torch.int32) * GOLDEN + group * SILVER


def random_bits(group: Tensor, group_size: int, bits: int) -> Tensor:
    """Return uniform random integers below 2^bits (8 or 16), int32 (*group.shape, G), one per element.

    group: `group_bits` of each group. 32 / bits consecutive elements share a hash, the first takes the lowest bits.
    """
    lane = torch.arange(group_size, dtype=torch.int32, device=group.device)
    sharing = 32 // bits
    x = mix(group.unsqueeze(-1) + lane.div(sharing, rounding_mode="floor") * GOLDEN)
    return (x >> lane % sharing * bits) & ((1 << bits) - 1)
