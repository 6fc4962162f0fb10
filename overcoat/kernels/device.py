"""Device functions that all kernels share: scales of FP8 operands, the casts to FP8, and maxima that keep NaN.

To equal plain PyTorch bit for bit, a kernel does the same FP32 operations in the same order. Three things need care:

* FMA: the compiler would contract a product and a sum into one. Kernels are launched with `EXACT`, which forbids it,
  and call `tl.fma` where they need one;
* roots, powers and reciprocals per element: kernel and reference both use the hardware's approximate instructions
  (hardware.py). At ten bytes per element and 4 TB/s there is time for 25 instructions; a correctly rounded root takes
  ten. Divisions per group or tensor are IEEE-rounded;
* maxima: the plain floating-point maximum drops NaN; here NaN wins, as in PyTorch.
"""

from __future__ import annotations

import functools
from typing import Any

from overcoat.formats import FLOAT8, float8
from overcoat.kernels import hardware
from overcoat.kernels.language import INTERPRETED, tl, triton

SCALE_FLOOR = tl.constexpr(float8.SCALE_FLOOR)
LOG2E = tl.constexpr(hardware.LOG2E)

# Triton's types of the FP8 formats.
TRITON_FLOAT8 = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}

# Launch option: no contraction of products and sums into FMAs.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}


@functools.cache
def inverse_max(fmt: str) -> float:
    """Return 1 / (largest finite value) of an FP8 format: the compile-time factor from amax to scale."""
    return 1.0 / FLOAT8[fmt].max


@functools.cache
def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def larger(a, b):
    """Return the larger of a and b; NaN if one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_magnitude(x, axis: tl.constexpr):
    """Return max |x| along an axis; NaN if one is NaN."""
    if INTERPRETED:
        # The interpreter's tl.reduce is a Python loop. As integers the bits of |x| have the same order, NaN largest.
        return tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(tl.abs(x), axis, larger)


@triton.jit
def as_words(pointer, BITS: tl.constexpr):
    """Cast a pointer to bytes to int16 or int32, to store the FP8 of consecutive rows together."""
    return pointer.to(tl.pointer_type(tl.int16 if BITS == 16 else tl.int32), bitcast=True)


@triton.jit
def atomic_amax(pointer, amax):
    """Raise the FP32 at `pointer` to amax >= 0; any order of arrival gives the same bits."""
    tl.atomic_max(pointer.to(tl.pointer_type(tl.int32), bitcast=True), amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def scale_of(amax, INVERSE_MAX: tl.constexpr):
    """Return the scale that maps amax to the format's maximum, 1 for 0, NaN for NaN: `formats.scale_from_amax`."""
    scale = amax * INVERSE_MAX
    scale = tl.where(scale < SCALE_FLOOR, SCALE_FLOOR, scale)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def inverse_of(scale):
    """Return 1 / scale, IEEE-rounded: the factor before the cast to FP8."""
    if INTERPRETED:
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [scale], tl.float32, is_pure=True, pack=1)


@triton.jit
def to_float8(x, TYPE: tl.constexpr):
    """Cast FP32 to E4M3 or E5M2, to nearest even, saturating, as the hardware does; NaN stays NaN."""
    if INTERPRETED:
        top: tl.constexpr = 57344.0 if tl.float8e5 == TYPE else 448.0
        x = tl.where(x > top, top, tl.where(x < -top, -top, x))
    return x.to(TYPE)


@triton.jit
def pack_rows(even, odd, TYPE: tl.constexpr):
    """Pack the FP8 bytes of two consecutive rows in one int16, the even row's in the low half.

    Triton transposes 16-bit words fast; 8-bit ones go to shared memory byte by byte (some come out wrong:
    tiles.store_quad_rows). One instruction converts and packs both.
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
    """Pack the FP8 bytes of four consecutive rows in one int32, the first in the lowest byte."""
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
