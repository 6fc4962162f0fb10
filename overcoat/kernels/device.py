"""Device functions that all kernels share: scales of FP8 operands, the casts to FP8, and maxima that keep NaN.

To equal plain PyTorch bit for bit, a kernel does the same FP32 operations in the same order. Three things need care:

* a product that feeds a sum would be contracted into one FMA: kernels are launched with `EXACT`, which forbids it, and
  write `tl.fma` where they want one;
* roots, powers and reciprocals per element: the hardware's instructions, on both sides (hardware.py); at ten bytes
  per element and 4 TB/s there is time for 25 instructions, a correctly rounded root takes ten. Divisions per
  group or tensor are IEEE-rounded;
* maxima: the plain floating-point maximum drops NaN; here NaN wins, as in PyTorch.

Legend: G group size; shapes of device functions are those of their operands.
"""

from __future__ import annotations

import functools
from typing import Any

from overcoat.formats import FLOAT8
from overcoat.kernels.language import INTERPRETED, tl, triton

SCALE_FLOOR = tl.constexpr(2.0**-126)
LOG2E = tl.constexpr(1.4426950408889634)

# Triton's types of the FP8 formats.
TRITON_FLOAT8 = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}

# Launch option: no contraction of products and sums into FMAs.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}


@functools.cache
def inverse_max(fmt: str) -> float:
    """1 / (largest finite value) of an FP8 format: the compile-time factor from amax to scale."""
    return 1.0 / FLOAT8[fmt].max


@functools.cache
def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def larger(a, b):
    """The larger of a and b; NaN if one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_magnitude(x, axis: tl.constexpr):
    """max |x| along an axis; NaN if one is NaN."""
    if INTERPRETED:
        # Its general reduction walks in Python; the bits of |x| as integers order like the values, NaN on top.
        return tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(tl.abs(x), axis, larger)


@triton.jit
def as_words(pointer, BITS: tl.constexpr):
    """The pointer to bytes as one to int16 or int32: FP8 of neighbouring rows, stored together."""
    return pointer.to(tl.pointer_type(tl.int16 if BITS == 16 else tl.int32), bitcast=True)


@triton.jit
def atomic_amax(pointer, amax):
    """Raise the FP32 at `pointer` to amax >= 0; any order of arrival gives the same bits."""
    tl.atomic_max(pointer.to(tl.pointer_type(tl.int32), bitcast=True), amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def scale_of(amax, INVERSE_MAX: tl.constexpr):
    """`formats.scale_from_amax`: the scale that maps amax to the format's maximum; 1 for 0; NaN passes."""
    scale = amax * INVERSE_MAX
    scale = tl.where(scale < SCALE_FLOOR, SCALE_FLOOR, scale)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def inverse_of(scale):
    """1 / scale, IEEE-rounded: what values are multiplied by before the cast."""
    if INTERPRETED:
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [scale], tl.float32, is_pure=True, pack=1)


@triton.jit
def to_float8(x, TYPE: tl.constexpr):
    """FP32 to E4M3 or E5M2, to nearest even and saturating: what the hardware does; NaN stays NaN."""
    if INTERPRETED:
        top: tl.constexpr = 57344.0 if tl.float8e5 == TYPE else 448.0
        x = tl.where(x > top, top, tl.where(x < -top, -top, x))
    return x.to(TYPE)


@triton.jit
def pack_rows(even, odd, TYPE: tl.constexpr):
    """FP8 bytes of two neighbouring rows as one int16, the even row's in the low half.

    Transposed through 16-bit words, bytes move two at a time: Triton has fast paths for 16 bits, for 8 it stores single
    bytes to shared memory (some come out wrong: tiles.store_quad_rows). One instruction converts and packs both.
    """
    if INTERPRETED:
        low = to_float8(even, TYPE).to(tl.uint8, bitcast=True).to(tl.int16)
        return low | (to_float8(odd, TYPE).to(tl.uint8, bitcast=True).to(tl.int16) << 8)
    elif TYPE == tl.float8e4nv:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", "=h,f,f", [odd, even], tl.int16, True, 1
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e5m2x2.f32 $0, $1, $2;", "=h,f,f", [odd, even], tl.int16, True, 1
        )


@triton.jit
def pack_quads(x0, x1, x2, x3, TYPE: tl.constexpr):
    """FP8 bytes of four neighbouring rows as one int32, the first in the lowest byte."""
    if INTERPRETED:
        low = pack_rows(x0, x1, TYPE).to(tl.int32) & 0xFFFF
        return low | (pack_rows(x2, x3, TYPE).to(tl.int32) << 16)
    elif TYPE == tl.float8e4nv:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
            "mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f", [x0, x1, x2, x3], tl.int32, True, 1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, $2, $1; cvt.rn.satfinite.e5m2x2.f32 b, $4, $3; "
            "mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f", [x0, x1, x2, x3], tl.int32, True, 1,
        )  # fmt: skip
