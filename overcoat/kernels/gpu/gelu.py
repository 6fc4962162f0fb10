"""Kernels of kernels/gelu.py: the function, u in 8-bit groups, and gelu(u) in FP8. The backward: gelu_backward.py.

Bytes moved, with V = T * I * 2:

    gelu_encode             1 V read, 1/2 V of codes written
    gelu_quantize           1 V read, 1/2 V written

Everything equals the reference bit for bit.

Legend: T tokens, I intermediate width, G group size, GP = G rounded up to a power of 2, n = ceil(I / G).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, group_code
from overcoat.kernels import gelu as reference
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    encode,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    power_of_2,
    scale_of,
    to_float8,
)
from overcoat.kernels.gpu.hardware import exp2, fma, reciprocal
from overcoat.kernels.gpu.launch import cdiv, kernel, on_device

SLOPE_1, SLOPE_3 = tl.constexpr(reference.SLOPE_1), tl.constexpr(reference.SLOPE_3)
TANH_1, TANH_3 = tl.constexpr(reference.TANH_1), tl.constexpr(reference.TANH_3)
SQUARE_MAX, VALLEY = tl.constexpr(reference.SQUARE_MAX), tl.constexpr(reference.VALLEY)
EXPONENT, DENSITY = tl.constexpr(reference.EXPONENT), tl.constexpr(reference.DENSITY)
ERF_0, ERF_1, ERF_2, ERF_3, ERF_4, ERF_5, ERF_6 = (tl.constexpr(x) for x in reference.ERF)

# Columns of a row that a program takes at a time.
ROW_TILE = 1024
ROW_WARPS = 2
# Elements that a program of the second pass takes, wherever rows begin.
QUANTIZE_TILE, QUANTIZE_WARPS = 2048, 4


@triton.jit
def gelu(u, TANH: tl.constexpr):
    """`gelu.gelu`: gelu(u) and its derivative."""
    square = u * u
    if TANH:
        odds = fma(square, TANH_3, TANH_1)
    else:
        odds = fma(fma(fma(square, ERF_6, ERF_5), square, ERF_4), square, ERF_3)
        odds = fma(fma(fma(odds, square, ERF_2), square, ERF_1), square, ERF_0)
    phi = reciprocal(1.0 + exp2(u * odds))
    h = u * phi
    if TANH:
        slope = fma(fma(-h, phi, h), fma(tl.minimum(square, SQUARE_MAX), SLOPE_3, SLOPE_1), phi)
    else:
        slope = fma(u * exp2(square * EXPONENT), DENSITY, phi)
    return h, slope


def is_tanh(approximate: str) -> bool:
    """The compile-time flag for `approximate`; ValueError if it is neither "none" nor "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate = {approximate!r} is not known; choose 'none' (erf) or 'tanh'")
    return approximate == "tanh"


@kernel
def _gelu_encode_kernel(
    u_ptr,  # (T, I)
    codes_ptr,  # (T, I) 8-bit
    amax_ptr,  # (T, n) BF16
    row_amax_ptr,  # (T,) FP32: max |h|, by `gelu.row_maxima`
    I,  # noqa: E741
    n,
    TANH: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    u_ptr += row * I
    codes_ptr += row * I
    amax_ptr += row * n
    high, widest = tl.zeros((NG, GP), tl.float32), tl.zeros((NG,), tl.float32)
    for g0 in range(0, n, NG):
        group = g0 + tl.arange(0, NG)
        column = group[:, None] * G + tl.arange(0, GP)[None, :]
        inside = (column < I) & (tl.arange(0, GP) < G)[None, :]
        u = tl.load(u_ptr + column, mask=inside, other=0.0).to(tl.float32)
        amax = max_magnitude(u, 1)
        high, widest = larger(high, u), larger(widest, amax)
        amax = amax.to(tl.bfloat16)
        tl.store(amax_ptr + group, amax, mask=group < n)
        tl.store(codes_ptr + column, encode(u, amax.to(tl.float32)[:, None], CODE), mask=inside)
    rise, _ = gelu(max_magnitude(max_magnitude(high, 1), 0), TANH)
    fall, _ = gelu(-tl.minimum(max_magnitude(widest, 0), VALLEY), TANH)
    tl.store(row_amax_ptr + row, larger(rise, tl.abs(fall)))


def gelu_encode(u: Tensor, approximate: str, code: str, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (T, I), maxima (T, n), row maxima of h (T,) of u (T, I)."""
    u = u.contiguous()
    tokens, width = u.shape
    n, gp = cdiv(width, group_size), power_of_2(group_size)
    codes = torch.empty(u.shape, dtype=group_code(code).dtype, device=u.device)
    amax = torch.empty((tokens, n), dtype=torch.bfloat16, device=u.device)
    row_amax = torch.empty(tokens, dtype=torch.float32, device=u.device)
    with on_device(u):
        _gelu_encode_kernel[(tokens,)](
            u, codes, amax, row_amax, width, n,
            is_tanh(approximate), group_size, gp, CODES[code], max(ROW_TILE // gp, 1), num_warps=ROW_WARPS, **EXACT,
        )  # fmt: skip
    return codes, amax, row_amax


@kernel
def _gelu_quantize_kernel(
    u_ptr,  # (T, I)
    amax_ptr,  # 0-d FP32
    h_ptr,  # (T, I) E4M3
    scale_ptr,  # 0-d FP32
    elements,  # T * I
    INVERSE_MAX: tl.constexpr,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    amax = tl.load(amax_ptr)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    u = tl.load(u_ptr + place, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(amax, INVERSE_MAX)
    h, _ = gelu(u, TANH)
    tl.store(h_ptr + place, to_float8(h * inverse_of(scale), tl.float8e4nv), mask=inside)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) == 0)


def gelu_quantize(u: Tensor, amax: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """h in E4M3 (T, I) and its scale."""
    u = u.contiguous()
    h, scale = torch.empty(u.shape, dtype=E4M3.dtype, device=u.device), torch.empty_like(amax)
    with on_device(u):
        _gelu_quantize_kernel[(cdiv(u.numel(), QUANTIZE_TILE),)](
            u, amax, h, scale, u.numel(), inverse_max("e4m3"), is_tanh(approximate), QUANTIZE_TILE,
            num_warps=QUANTIZE_WARPS, **EXACT,
        )  # fmt: skip
    return h, scale
