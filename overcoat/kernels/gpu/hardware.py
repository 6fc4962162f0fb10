"""The instructions of `overcoat.hardware` for Triton kernels, and as elementwise kernels for the reference on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat import hardware
from overcoat.kernels.gpu.launch import cdiv, on_device

# Triton's interpreter knows no inline assembly: there the functions are NumPy's.
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def log2(x):
    """lg2.approx.ftz.f32"""
    if _INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def exp2(x):
    """ex2.approx.ftz.f32"""
    if _INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def sqrt(x):
    """sqrt.approx.ftz.f32"""
    if _INTERPRETED:
        return tl.sqrt_rn(x)
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """rcp.approx.ftz.f32"""
    if _INTERPRETED:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def fma(x, y, z):
    """fma.rn.f32; y and z may be scalars."""
    if _INTERPRETED:
        y = tl.zeros(x.shape, tl.float32) + y  # the interpreter leaves a scalar argument as Python has it
        return (x.to(tl.float64) * y + z).to(tl.float32)
    return tl.fma(x, y, z)


@triton.jit
def second_byte(x):
    """Bits 8 to 15 of FP32 or int32 numbers, int8; four are packed by three instructions, shifts would be four more."""
    if _INTERPRETED:
        return (x.to(tl.int32, bitcast=True) >> 8).to(tl.int8)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x0051; prmt.b32 b, $3, $4, 0x0051; prmt.b32 $0, a, b, 0x5410; }",
        "=r,r,r,r,r", [x], tl.int8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def to_bfloat16(x):
    """FP32 rounded to the nearest even BF16; the interpreter's own cast truncates."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def to_float8(x, TYPE: tl.constexpr, MANTISSA: tl.constexpr, TINY_LOG2: tl.constexpr):
    """FP32 within the format's range, rounded to the nearest even; the interpreter's own cast does not.

    MANTISSA: stored bits of it. TINY_LOG2: exponent of the smallest positive value.
    """
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        last = (bits >> (23 - MANTISSA)) & 1
        normal = (bits + (1 << (22 - MANTISSA)) - 1 + last) & -(1 << (23 - MANTISSA))
        magic: tl.constexpr = 1.5 * 2.0 ** (23 + TINY_LOG2)
        small = ((tl.abs(x) + magic) - magic).to(tl.int32, bitcast=True) | (bits & -2147483648)
        return tl.where(tl.abs(x) < 2.0 ** (TINY_LOG2 + MANTISSA), small, normal).to(tl.float32, bitcast=True).to(TYPE)
    return x.to(TYPE)


@triton.jit
def _elementwise_kernel(x, y, count, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offset, offset < count, 1.0)
    tl.store(y + offset, FUNCTION(value), offset < count)


@triton.jit
def _fma_kernel(x, y, z, result, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    value = fma(tl.load(x + offset, mask), tl.load(y + offset, mask), tl.load(z + offset, mask))
    tl.store(result + offset, value, mask)


@hardware.fma.cuda
def _(x, y, z):
    x, y, z = (each.contiguous() for each in torch.broadcast_tensors(x, y, z))
    result = torch.empty_like(x)
    if x.numel():
        with on_device(x):
            _fma_kernel[(cdiv(x.numel(), 1024),)](x, y, z, result, x.numel(), 1024)
    return result


def _launcher(function):
    def launch(x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        if x.numel():
            with on_device(x):
                _elementwise_kernel[(cdiv(x.numel(), 1024),)](x, y, x.numel(), function, 1024)
        return y

    return launch


for _op, _function in (
    (hardware.log2, log2),
    (hardware.exp2, exp2),
    (hardware.sqrt, sqrt),
    (hardware.reciprocal, reciprocal),
):
    _op.cuda(_launcher(_function))
