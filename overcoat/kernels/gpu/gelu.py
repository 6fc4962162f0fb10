"""Kernels of kernels/gelu.py: u in 8-bit groups, gelu(u) in FP8, and the backward straight into FP8.

Bytes moved, with V = T * I * 2:

    gelu_encode             1 V read, 1/2 V of codes written
    gelu_quantize           1 V read, 1/2 V written
    gelu_backward           1 V + 1/2 V read, 1 V + 1/2 V written
    gelu_backward_amax      1 V + 1/2 V read, 1/2 V written (gelu(u), rebuilt and transposed)
    gelu_backward_quantize  1 V + 1/2 V read, 1/2 V + 1/2 V written: du in both FP8 layouts; and, with a bias, each
                            tile's sums over its tokens, V / 32

The last two replace gelu_backward, du's sum, maximum and quantization (7 V) by 4.5 V: du in 16 bits never exists.
Everything equals the reference bit for bit, except the sums over tokens, which add in another order.

Legend: T tokens, I intermediate width, P padded tokens, G group size, GP = G rounded up to a power of 2,
n = ceil(I / G).
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, FLOAT8, group_code
from overcoat.kernels import gelu as reference
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    atomic_amax,
    encode,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    pack_rows,
    power_of_2,
    scale_of,
    to_float8,
)
from overcoat.kernels.gpu.hardware import exp2, reciprocal
from overcoat.kernels.gpu.launch import cdiv, kernel, on_device
from overcoat.kernels.gpu.tiles import decode_rows, group_columns, store_transposed
from overcoat.kernels.quantize import padded_tokens

SLOPE_1, SLOPE_3 = tl.constexpr(reference.SLOPE_1), tl.constexpr(reference.SLOPE_3)
TANH_1, TANH_3 = tl.constexpr(reference.TANH_1), tl.constexpr(reference.TANH_3)
SQUARE_MAX, VALLEY = tl.constexpr(reference.SQUARE_MAX), tl.constexpr(reference.VALLEY)
ERF_P, EXPONENT, DENSITY = (tl.constexpr(x) for x in (reference.ERF_P, reference.EXPONENT, reference.DENSITY))
ERF_1, ERF_2, ERF_3, ERF_4, ERF_5 = (tl.constexpr(x) for x in reference.ERF)

# Columns of a row that a program takes at a time.
ROW_TILE = 1024
ROW_WARPS = 2


@triton.jit
def gelu(u, TANH: tl.constexpr):
    """`gelu.gelu`: gelu(u) and its derivative."""
    if TANH:
        square = tl.minimum(u * u, SQUARE_MAX)
        phi = reciprocal(1.0 + exp2(u * (square * TANH_3 + TANH_1)))
        return u * phi, phi + phi * (1.0 - phi) * u * (square * SLOPE_3 + SLOPE_1)
    else:
        t = reciprocal(tl.abs(u) * ERF_P + 1.0)
        e = exp2(u * u * EXPONENT)
        tail = ((((t * ERF_5 + ERF_4) * t + ERF_3) * t + ERF_2) * t + ERF_1) * t * e
        phi = tl.where(u < 0, tail, 1.0 - tail)
        return u * phi, phi + u * e * DENSITY


def is_tanh(approximate: str) -> bool:
    """The compile-time flag for `approximate`; ValueError if it is neither "none" nor "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate = {approximate!r} is not known; choose 'none' (erf) or 'tanh'")
    return approximate == "tanh"


# ---- forward --------------------------------------------------------------------------------------------------------


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
    I,  # noqa: E741
    INVERSE_MAX: tl.constexpr,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) == 0)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    h, _ = gelu(tl.load(u_ptr + row * I + column, mask=inside, other=0.0).to(tl.float32), TANH)
    tl.store(h_ptr + row * I + column, to_float8(h * inverse_of(scale), tl.float8e4nv), mask=inside)


def gelu_quantize(u: Tensor, amax: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """h in E4M3 (T, I) and its scale."""
    u = u.contiguous()
    tokens, width = u.shape
    h, scale = torch.empty((tokens, width), dtype=E4M3.dtype, device=u.device), torch.empty_like(amax)
    with on_device(u):
        _gelu_quantize_kernel[(tokens, cdiv(width, 2 * ROW_TILE))](
            u, amax, h, scale, width, inverse_max("e4m3"), is_tanh(approximate), 2 * ROW_TILE, num_warps=4, **EXACT
        )
    return h, scale


# ---- backward -------------------------------------------------------------------------------------------------------


@triton.jit
def gradient_rows(
    dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n,  # noqa: E741
    CODE: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """Rows t of a tile (BT, NG, GP), of which `rows` and `groups` exist: du, h, and which are inside."""
    u, inside = decode_rows(codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n, CODE)
    dh = tl.load(dh_ptr + (t[:, None, None] * I + c[None, :, :]), mask=inside, other=0.0).to(tl.float32)
    h, slope = gelu(u, TANH)
    return dh * slope, h, inside


@kernel
def _gelu_product_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, I) 8-bit
    amax_ptr,  # (T, n) BF16
    scale_ptr,  # 0-d FP32: scale of h
    out_ptr,  # (T, I): du, if VALUES
    h_t_ptr,  # (I, P / 2) int16: pairs of E4M3
    result_ptr,  # 0-d int32: bits of max |du|, unless VALUES
    T,
    I,  # noqa: E741
    P,
    n,
    VALUES: tl.constexpr,
    TANH: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
    BT: tl.constexpr,
):
    t0, g0 = tl.program_id(0) * BT, tl.program_id(1) * NG
    pair = tl.arange(0, BT // 2)
    g, c, real = group_columns(g0, I, G, GP, NG)
    start = t0.to(tl.int64) * I + g0 * G
    dh_ptr += start
    codes_ptr += start
    amax_ptr += t0.to(tl.int64) * n + g0
    rows, groups, t = T - t0, n - g0, 2 * pair
    d0, h0, in0 = gradient_rows(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n, CODE, TANH)
    d1, h1, in1 = gradient_rows(dh_ptr, codes_ptr, amax_ptr, t + 1, c, g, real, rows, groups, I, n, CODE, TANH)
    inverse = inverse_of(tl.load(scale_ptr))
    words = pack_rows(tl.where(in0, h0 * inverse, 0.0), tl.where(in1, h1 * inverse, 0.0), tl.float8e4nv)
    h_t_ptr += (g0 * G).to(tl.int64) * (P // 2) + t0 // 2
    store_transposed(words, h_t_ptr, c, pair, real, (P - t0) // 2, P // 2)
    if VALUES:
        target = out_ptr + start + (t[:, None, None] * I + c[None, :, :])
        tl.store(target, d0.to(out_ptr.dtype.element_ty), mask=in0)
        tl.store(target + I, d1.to(out_ptr.dtype.element_ty), mask=in1)
    else:
        # Outside everything is zero: dh is loaded as zero there.
        top = larger(tl.abs(d0), tl.abs(d1))
        atomic_amax(result_ptr, max_magnitude(max_magnitude(max_magnitude(top, 2), 1), 0))


@kernel
def _gelu_gradient_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, I) 8-bit
    group_amax_ptr,  # (T, n) BF16
    amax_ptr,  # 0-d FP32: max |du|
    out_ptr,  # (T, I) FP8: du
    out_t_ptr,  # (I, P / 2) int16: pairs of FP8
    scale_ptr,  # 0-d FP32
    partial_ptr,  # (ceil(P / BT), I) FP32: sums over a tile's tokens, if SUMS
    T,
    I,  # noqa: E741
    P,
    n,
    INVERSE_MAX: tl.constexpr,
    SUMS: tl.constexpr,
    TANH: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
    BT: tl.constexpr,
):
    t0, g0 = tl.program_id(0) * BT, tl.program_id(1) * NG
    pair = tl.arange(0, BT // 2)
    g, c, real = group_columns(g0, I, G, GP, NG)
    start = t0.to(tl.int64) * I + g0 * G
    dh_ptr += start
    codes_ptr += start
    group_amax_ptr += t0.to(tl.int64) * n + g0
    rows, groups, t = T - t0, n - g0, 2 * pair
    d0, _, in0 = gradient_rows(dh_ptr, codes_ptr, group_amax_ptr, t, c, g, real, rows, groups, I, n, CODE, TANH)
    d1, _, in1 = gradient_rows(dh_ptr, codes_ptr, group_amax_ptr, t + 1, c, g, real, rows, groups, I, n, CODE, TANH)
    if SUMS:
        partial_ptr += tl.program_id(0).to(tl.int64) * I + g0 * G
        tl.store(partial_ptr + c, tl.sum(d0 + d1, 0), mask=real)
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) == 0)
    inverse = inverse_of(scale)
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    # Padding stays zero even where the scale is not finite.
    d0, d1 = tl.where(in0, d0 * inverse, 0.0), tl.where(in1, d1 * inverse, 0.0)
    target = out_ptr + start + (t[:, None, None] * I + c[None, :, :])
    tl.store(target, to_float8(d0, TYPE), mask=in0)
    tl.store(target + I, to_float8(d1, TYPE), mask=in1)
    out_t_ptr += (g0 * G).to(tl.int64) * (P // 2) + t0 // 2
    store_transposed(pack_rows(d0, d1, TYPE), out_t_ptr, c, pair, real, (P - t0) // 2, P // 2)


# (tokens, columns) of a tile and its warps: SwiGLU's (docs/log-kernels.md).
PRODUCT_TILE, PRODUCT_WARPS = (16, 128), 4
GRADIENT_TILE, GRADIENT_WARPS = (64, 128), 8


def _launch_product(
    dh: Tensor, codes: Tensor, group_amax: Tensor, scale: Tensor, out: Optional[Tensor], how: tuple[str, str, int]
) -> tuple[Tensor, Tensor]:
    """max |du| (garbage if du itself goes to `out`) and h transposed (I, P); how: form, code, group size."""
    approximate, code, group_size = how
    (tokens, width), padded = dh.shape, padded_tokens(dh.shape[0])
    bits = torch.zeros((), dtype=torch.int32, device=dh.device)
    h_t = torch.empty((width, padded), dtype=E4M3.dtype, device=dh.device)
    n, gp = group_amax.shape[1], power_of_2(group_size)
    count = max(PRODUCT_TILE[1] // gp, 1)
    with on_device(dh):
        _gelu_product_kernel[(cdiv(padded, PRODUCT_TILE[0]), cdiv(n, count))](
            dh, codes, group_amax, scale, dh if out is None else out, h_t.view(torch.int16), bits, tokens, width,
            padded, n, out is not None, is_tanh(approximate), group_size, gp, CODES[code], count, PRODUCT_TILE[0],
            num_warps=PRODUCT_WARPS, **EXACT,
        )  # fmt: skip
    return bits.view(torch.float32), h_t


def gelu_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, scale: Tensor, approximate: str, code: str, group_size: int
) -> tuple[Tensor, Tensor]:
    """du (T, I) in dh's dtype; h rebuilt, transposed E4M3 (I, P)."""
    dh = dh.contiguous()
    out = torch.empty_like(dh)
    return out, _launch_product(dh, codes, group_amax, scale, out, (approximate, code, group_size))[1]


def gelu_backward_amax(
    dh: Tensor, codes: Tensor, group_amax: Tensor, scale: Tensor, approximate: str, code: str, group_size: int
) -> tuple[Tensor, Tensor]:
    """max |du|, 0-d FP32; h rebuilt, transposed E4M3 (I, P)."""
    return _launch_product(dh.contiguous(), codes, group_amax, scale, None, (approximate, code, group_size))


def gelu_backward_quantize(
    dh: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    amax: Tensor,
    fmt: str,
    has_bias: bool,
    approximate: str,
    code: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """du in FP8: (T, I), transposed (I, P), its scale; its sum over tokens (I,) or (0,) FP32."""
    dh = dh.contiguous()
    (tokens, width), padded = dh.shape, padded_tokens(dh.shape[0])
    out = torch.empty(dh.shape, dtype=FLOAT8[fmt].dtype, device=dh.device)
    out_t = torch.empty((width, padded), dtype=out.dtype, device=dh.device)
    scale = torch.empty_like(amax)
    n, gp = group_amax.shape[1], power_of_2(group_size)
    count, turns = max(GRADIENT_TILE[1] // gp, 1), cdiv(padded, GRADIENT_TILE[0])
    partial = torch.empty((turns if has_bias else 0, width), dtype=torch.float32, device=dh.device)
    with on_device(dh):
        _gelu_gradient_kernel[(turns, cdiv(n, count))](
            dh, codes, group_amax, amax, out, out_t.view(torch.int16), scale, partial if has_bias else scale,
            tokens, width, padded, n, inverse_max(fmt), has_bias, is_tanh(approximate),
            group_size, gp, CODES[code], count, GRADIENT_TILE[0], num_warps=GRADIENT_WARPS, **EXACT,
        )  # fmt: skip
    return out, out_t, scale, partial.sum(0) if has_bias else partial.view(0)
