"""Codes of saved tensors as device functions: `encode` and `decode` equal formats/groups.py's bit for bit.

A new format needs a constant, a branch in `encode` and one in `decode`.

Legend: G group size.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from overcoat import formats
from overcoat.kernels.device import max_magnitude, to_float8
from overcoat.kernels.instructions import reciprocal, sqrt, to_float32
from overcoat.kernels.language import tl, triton

AMAX_FLOOR = tl.constexpr(formats.AMAX_FLOOR)
# Adding 1.5 * 2^23 to |x| < 2^22 rounds x to an integer (half to even), which is then the low bits of the sum.
ROUNDER = tl.constexpr(1.5 * 2.0**23)
SIGN = tl.constexpr(-(2**31))

# Codes as compile-time constants; any other value is sqrt8.
E4M3_CODE = tl.constexpr(1)
INT8 = tl.constexpr(2)
CODES = {"sqrt8": 0, "e4m3": 1, "int8": 2}


def empty_codes(x: Tensor, groups: Sequence[int], code: str) -> tuple[Tensor, Tensor]:
    """Allocate codes in x's shape, and BF16 maxima of shape `groups`."""
    return x.new_empty(*x.shape, dtype=formats.group_code(code).dtype), x.new_empty(*groups, dtype=torch.bfloat16)


@triton.jit
def _ratio(TOP: tl.constexpr, amax):
    """Return TOP / amax, or 0 where amax is (nearly) zero or NaN: `_ratio` in formats/groups.py."""
    return tl.where(amax >= AMAX_FLOOR, reciprocal(amax * (1.0 / TOP)), 0.0)


@triton.jit
def encode(x, amax, CODE: tl.constexpr):
    """Encode x (..., G) with the groups' stored maxima amax (..., 1), both FP32: `formats.encode_groups`."""
    if CODE == E4M3_CODE:
        return to_float8(x * _ratio(448.0, amax), tl.float8e4nv)
    elif CODE == INT8:
        y = x * _ratio(127.0, amax)
        y = tl.where(y == y, tl.minimum(tl.maximum(y, -127.0), 127.0), 0.0)
        return (y + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        # max() turns NaN into code 0: the group's maximum carries the NaN.
        root = sqrt(tl.maximum(tl.abs(x) * _ratio(16129.0, amax), 0.0))
        sign = x.to(tl.int32, bitcast=True) & SIGN
        signed = (root.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        return (signed + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def store_codes(x, codes_ptr, amax_ptr, inside, known, CODE: tl.constexpr, AXIS: tl.constexpr):
    """Store codes and maxima of x, FP32, groups along the last axis, AXIS; return the exact maxima, FP32."""
    exact = max_magnitude(x, AXIS)
    amax = exact.to(tl.bfloat16)
    tl.store(amax_ptr, amax, mask=known)
    tl.store(codes_ptr, encode(x, tl.expand_dims(amax.to(tl.float32), AXIS), CODE), mask=inside)
    return exact


@triton.jit
def decode(codes, amax, CODE: tl.constexpr):
    """Decode codes (..., G) with maxima amax (..., 1) in FP32 to FP32: `formats.decode_groups`."""
    if CODE == E4M3_CODE:
        return codes.to(tl.float32) * (amax * (1.0 / 448.0))
    elif CODE == INT8:
        return to_float32(codes) * (amax * (1.0 / 127.0))
    else:
        c = to_float32(codes)
        return c * tl.abs(c) * (amax * (1.0 / 16129.0))


@triton.jit
def pack_bf12(x, amax):
    """Encode x (..., D) with stored maxima amax (..., 1), both FP32, in 12 bits as int32: `bf12.encode_bf12`."""
    field = 254 - (amax.to(tl.int32, bitcast=True) >> 23)
    power = (tl.maximum(field, 0) << 23).to(tl.float32, bitcast=True)
    bits = (x * power * 2.0**-112).to(tl.int32, bitcast=True) + 0x8000
    return ((bits >> 16) & 0x7FF) | ((bits >> 20) & 0x800)


@triton.jit
def load_bf12(upper, lower, amax):
    """Decode upper bits int8 and lower bits int32 (0 to 15), maxima amax (..., 1) FP32: `bf12.decode_bf12`."""
    codes = (upper.to(tl.int32) << 4) | lower
    z = ((codes & 0x7FF) << 16) | (codes & SIGN)
    power = ((amax.to(tl.int32, bitcast=True) >> 23) << 23).to(tl.float32, bitcast=True)
    return z.to(tl.float32, bitcast=True) * 2.0**112 * power
