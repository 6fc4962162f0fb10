"""GPU instructions as device functions: single instructions where Triton would emit several, and PyTorch's rounding.

hardware.py makes ops of the approximate ones, so that references on a GPU compute the same bits. Triton's interpreter
has no inline assembly: there the functions use NumPy.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from overcoat.kernels.language import INTERPRETED, tl, triton
from overcoat.kernels.launch import cdiv


@triton.jit
def log2(x):
    """lg2.approx.ftz.f32"""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def exp2(x):
    """ex2.approx.ftz.f32"""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def sqrt(x):
    """sqrt.approx.ftz.f32"""
    if INTERPRETED:
        return tl.sqrt_rn(x)
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def log2_magnitude(x):
    """Return `log2` of |x|; the magnitude costs no extra instruction."""
    if INTERPRETED:
        return tl.log2(tl.abs(x))
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a; abs.f32 a, $1; lg2.approx.ftz.f32 $0, a; }", "=f,f", [x], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rsqrt(x):
    """rsqrt.approx.ftz.f32"""
    if INTERPRETED:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.sqrt_rn(x))
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def root_with_sign(x):
    """Return sign(x) sqrt(|x|) with `sqrt`."""
    if INTERPRETED:
        return tl.where(x < 0.0, -1.0, 1.0) * tl.sqrt_rn(tl.abs(x))
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a; abs.f32 a, $1; sqrt.approx.ftz.f32 a, a; copysign.f32 $0, $1, a; }",
        "=f,f", [x], tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def signed_root(x, smallest):
    """Return sign(x) sqrt(|x|) with `sqrt`, 0 where |x| < smallest."""
    if INTERPRETED:
        root = tl.where(x < 0.0, -1.0, 1.0) * tl.sqrt_rn(tl.abs(x))
        return tl.where(tl.abs(x) < smallest, 0.0, root)
    x, smallest = tl.broadcast(x, smallest)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a; .reg .pred p; abs.f32 a, $1; setp.lt.f32 p, a, $2; sqrt.approx.ftz.f32 a, a; "
        "copysign.f32 a, $1, a; selp.f32 $0, 0f00000000, a, p; }",
        "=f,f,f", [x, smallest], tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def reciprocal(x):
    """rcp.approx.ftz.f32"""
    if INTERPRETED:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def fma(x, y, z):
    """fma.rn.f32; y and z may be scalars."""
    if INTERPRETED:
        y = tl.zeros(x.shape, tl.float32) + y  # in the interpreter a scalar argument is a Python number
        return (x.to(tl.float64) * y + z).to(tl.float32)
    return tl.fma(x, y, z)


@triton.jit
def second_byte(x):
    """Return bits 8 to 15 of FP32 or int32 numbers as int8. Three instructions pack four; shifts would take seven."""
    if INTERPRETED:
        return (x.to(tl.int32, bitcast=True) >> 8).to(tl.int8)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x0051; prmt.b32 b, $3, $4, 0x0051; prmt.b32 $0, a, b, 0x5410; }",
        "=r,r,r,r,r", [x], tl.int8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def second_byte_flipped(x):
    """Return `second_byte` with its highest bit inverted."""
    if INTERPRETED:
        return ((x.to(tl.int32, bitcast=True) >> 8) ^ 0x80).to(tl.int8)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x0051; prmt.b32 b, $3, $4, 0x0051; prmt.b32 a, a, b, 0x5410; "
        "xor.b32 $0, a, 0x80808080; }",
        "=r,r,r,r,r", [x], tl.int8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def byte_of(x, number):
    """Return byte `number`, 0 to 3, of uint32 numbers as int32; one instruction if `number` is constant per thread."""
    if INTERPRETED:
        return ((x >> (number * 8)) & 0xFF).to(tl.int32)
    x, selector = tl.broadcast(x, number + 0x4440)
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, $2;", "=r,r,r", [x, selector], tl.int32, is_pure=True, pack=1)


@triton.jit
def to_float32(x):
    """Convert to FP32; four or more BF16 or int8 numbers take one or two instructions each."""
    if INTERPRETED or x.numel < 4:
        return x.to(tl.float32)
    elif x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], tl.float32, is_pure=True, pack=2
        )
    elif x.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d; bfe.s32 a, $4, 0, 8; bfe.s32 b, $4, 8, 8; bfe.s32 c, $4, 16, 8; "
            "bfe.s32 d, $4, 24, 8; cvt.rn.f32.s32 $0, a; cvt.rn.f32.s32 $1, b; cvt.rn.f32.s32 $2, c; "
            "cvt.rn.f32.s32 $3, d; }",
            "=f,=f,=f,=f,r", [x], tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return x.to(tl.float32)


@triton.jit
def arrived(codes, x):
    """Return 8-bit codes unchanged, but make them depend on the load of as many BF16 numbers x.

    Otherwise ptxas delays the load of x until the arithmetic on the codes is done, and a thread waits for memory twice.
    One instruction per four codes: codes | (x & z), with z the program's index on the grid's third axis, always zero.
    So the grid must have one or two axes.
    """
    if INTERPRETED or x.dtype != tl.bfloat16 or codes.numel < 4:
        return codes
    zero = tl.broadcast_to(tl.program_id(2), codes.shape)
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $4, 0xf8;", "=r,r,r,r,r,r,r,r", [codes, x, zero], codes.dtype, is_pure=True, pack=4
    )


@triton.jit
def add_remainder(param, remainder):
    """Return FP32 numbers: the bits of a BF16's magnitude plus 256 times an int8, at least 0, with the BF16's sign."""
    if INTERPRETED:
        bits = param.to(tl.float32).to(tl.int32, bitcast=True)
        size = tl.maximum((bits & 0x7FFFFFFF) + (remainder.to(tl.int32) << 8), 0)
        return (size | (bits & -2147483648)).to(tl.float32, bitcast=True)
    # For each of four: the magnitude; 256 times the remainder, sign-extended by prmt; the sum; the sign.
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, c, d, e, f, g, h, i, j;
        shl.b32 a, $4, 16; and.b32 b, a, 0x7fff0000; prmt.b32 c, $6, 0, 0x8804; add.s32 b, b, c; max.s32 b, b, 0;
        lop3.b32 $0, b, a, 0x80000000, 0xf8;
        and.b32 b, $4, 0x7fff0000; prmt.b32 c, $6, 0, 0x9914; add.s32 d, b, c; max.s32 d, d, 0;
        lop3.b32 $1, d, $4, 0x80000000, 0xf8;
        shl.b32 e, $5, 16; and.b32 f, e, 0x7fff0000; prmt.b32 g, $6, 0, 0xaa24; add.s32 f, f, g; max.s32 f, f, 0;
        lop3.b32 $2, f, e, 0x80000000, 0xf8;
        and.b32 h, $5, 0x7fff0000; prmt.b32 i, $6, 0, 0xbb34; add.s32 j, h, i; max.s32 j, j, 0;
        lop3.b32 $3, j, $5, 0x80000000, 0xf8; }""",
        "=&f,=&f,=&f,=f,r,r,r", [param, remainder], tl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def to_bfloat16(x):
    """Round FP32 to BF16, to nearest even; the interpreter's own cast truncates."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def to_float8(x, TYPE: tl.constexpr, MANTISSA: tl.constexpr, TINY_LOG2: tl.constexpr):
    """Round FP32 within the format's range to FP8, to nearest even; the interpreter's own cast does not.

    MANTISSA: stored mantissa bits. TINY_LOG2: log2 of the smallest positive value.
    """
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        last = (bits >> (23 - MANTISSA)) & 1
        normal = (bits + (1 << (22 - MANTISSA)) - 1 + last) & -(1 << (23 - MANTISSA))
        magic: tl.constexpr = 1.5 * 2.0 ** (23 + TINY_LOG2)
        small = ((tl.abs(x) + magic) - magic).to(tl.int32, bitcast=True) | (bits & -2147483648)
        return tl.where(tl.abs(x) < 2.0 ** (TINY_LOG2 + MANTISSA), small, normal).to(tl.float32, bitcast=True).to(TYPE)
    return x.to(TYPE)


@triton.jit
def _elementwise_kernel(x, y, z, result, count, FUNCTION: tl.constexpr, ARGUMENTS: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    value = tl.load(x + offset, inside, 1.0)
    if ARGUMENTS == 1:
        value = FUNCTION(value)
    else:
        value = FUNCTION(value, tl.load(y + offset, inside, 1.0), tl.load(z + offset, inside, 1.0))
    tl.store(result + offset, value, inside)


def elementwise(function: Any) -> Callable[..., Tensor]:
    """Return a launcher of `function`, of one or three arguments, on FP32 tensors that broadcast together."""

    def launch(*tensors: Tensor) -> Tensor:
        arguments = [x.contiguous() for x in torch.broadcast_tensors(*tensors)]
        result = torch.empty_like(arguments[0])
        if result.numel():
            x, y, z = arguments if len(arguments) == 3 else arguments * 3
            grid = (cdiv(x.numel(), 1024),)
            _elementwise_kernel[grid](x, y, z, result, x.numel(), function, len(arguments), 1024)
        return result

    return launch
