"""Kernels of kernels/swiglu.py: gate and up in 8-bit groups, their product in FP8, and the backward straight into FP8.

Bytes moved, with V = T * I * 2 (2.69 U in Llama):

    swiglu_encode             2 V read, 1 V of codes written
    swiglu_quantize           2 V read, 1/2 V written
    swiglu_backward           1 V + 1 V read, 2 V + 1/2 V written
    swiglu_backward_amax      1 V + 1 V read, 1/2 V written (the product, rebuilt and transposed)
    swiglu_backward_quantize  1 V + 1 V read, 1 V + 1 V written: the gradient in both FP8 layouts

The last two replace swiglu_backward, a maximum and a quantization (10.5 V) by 6.5 V: the gradient in BF16 never exists.
Everything equals the reference bit for bit.

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
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    atomic_amax,
    decode,
    encode,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    pack_rows,
    power_of_2,
    scale_of,
    sigmoid,
    to_float8,
)
from overcoat.kernels.gpu.launch import cdiv, kernel, on_device

# Pairs of gate and up that a program encodes, and its warps.
ENCODE_TILE, ENCODE_WARPS = 2048, 4
# Columns of a row whose product a program takes.
PRODUCT_COLUMNS = 2048
SILU_BOUND = tl.constexpr(0.2785)
# More than the products' rounding can add to a bound.
ROUNDING = tl.constexpr(1.0 + 2.0**-20)


# ---- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def _encode_half(values_ptr, codes_ptr, amax_ptr, offsets, places, inside, known, CODE: tl.constexpr):
    """Load (NG, GP) values of gate or up, write their codes and maxima; returns both in FP32."""
    x = tl.load(values_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    amax = max_magnitude(x, 1).to(tl.bfloat16)
    tl.store(amax_ptr + places, amax, mask=known)
    amax = amax.to(tl.float32)
    tl.store(codes_ptr + offsets, encode(x, amax[:, None], CODE), mask=inside)
    return x, amax


@triton.jit
def _bound(gate, up, gate_amax):
    """Bits of a number that max |gate sigmoid(gate) up| of a tile does not exceed; NaN where it may be NaN.

    silu(x) is at most x for positive x and at least -0.27847 for all others; at -inf it is NaN.
    """
    bound = max_magnitude(larger(gate, SILU_BOUND) * tl.abs(up), 1) * ROUNDING
    bound = tl.where(gate_amax < float("inf"), bound, float("nan"))
    return max_magnitude(bound, 0).to(tl.int32, bitcast=True)


@kernel
def _swiglu_encode_kernel(
    gate_up_ptr,  # (T, 2I)
    codes_ptr,  # (T, 2I) 8-bit
    amax_ptr,  # (T, 2, n) BF16
    top_ptr,  # 0-d int32: bits of max |h|
    groups,  # T * n
    n,
    I,  # noqa: E741
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
):
    group = tl.program_id(0) * NG + tl.arange(0, NG)
    known, row = group < groups, group // n
    column = (group - row * n)[:, None] * G + tl.arange(0, GP)[None, :]
    inside = known[:, None] & (column < I) & (tl.arange(0, GP) < G)[None, :]
    offsets = row.to(tl.int64)[:, None] * (2 * I) + column
    places = group + row * n  # among (T, 2, n)
    seen = tl.load(top_ptr)
    gate, gate_amax = _encode_half(gate_up_ptr, codes_ptr, amax_ptr, offsets, places, inside, known, CODE)
    up, _ = _encode_half(gate_up_ptr + I, codes_ptr + I, amax_ptr + n, offsets, places, inside, known, CODE)
    # Half of the special function unit's work would be h, of which only the largest is wanted. Once the first programs
    # have found large values few tiles can hold a larger one, and only those compute theirs. Which do depends on who
    # comes first; the result does not.
    if _bound(gate, up, gate_amax) > seen:
        h = gate * sigmoid(gate) * up
        atomic_amax(top_ptr, max_magnitude(max_magnitude(h, 1), 0))


def swiglu_encode(gate_up: Tensor, code: str, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (T, 2I), maxima (T, 2, n), max |h| (0-d FP32) of gate_up (T, 2I)."""
    gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    n, gp = cdiv(width, group_size), power_of_2(group_size)
    codes = torch.empty(gate_up.shape, dtype=group_code(code).dtype, device=gate_up.device)
    amax = torch.empty((tokens, 2, n), dtype=torch.bfloat16, device=gate_up.device)
    top = torch.zeros((), dtype=torch.int32, device=gate_up.device)
    count = max(ENCODE_TILE // gp, 1)
    with on_device(gate_up):
        _swiglu_encode_kernel[(cdiv(tokens * n, count),)](
            gate_up, codes, amax, top, tokens * n, n, width,
            group_size, gp, CODES[code], count, num_warps=ENCODE_WARPS, **EXACT,
        )  # fmt: skip
    return codes, amax, top.view(torch.float32)


@kernel
def _swiglu_quantize_kernel(
    gate_up_ptr,  # (T, 2I)
    amax_ptr,  # 0-d FP32
    h_ptr,  # (T, I) E4M3
    scale_ptr,  # 0-d FP32
    I,  # noqa: E741
    INVERSE_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) == 0)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    gate = tl.load(gate_up_ptr + row * 2 * I + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * I + I + column, mask=inside, other=0.0).to(tl.float32)
    h = gate * sigmoid(gate) * up * inverse_of(scale)
    tl.store(h_ptr + row * I + column, to_float8(h, tl.float8e4nv), mask=inside)


def swiglu_quantize(gate_up: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """h in E4M3 (T, I) and its scale."""
    gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    h, scale = torch.empty((tokens, width), dtype=E4M3.dtype, device=gate_up.device), torch.empty_like(amax)
    with on_device(gate_up):
        _swiglu_quantize_kernel[(tokens, cdiv(width, PRODUCT_COLUMNS))](
            gate_up, amax, h, scale, width, inverse_max("e4m3"), PRODUCT_COLUMNS, num_warps=4, **EXACT
        )
    return h, scale


# ---- backward -------------------------------------------------------------------------------------------------------


@triton.jit
def gradient_rows(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n, CODE: tl.constexpr):  # noqa: E741
    """Rows t of a tile (BT, NG, GP), of which `rows` and `groups` exist: dgate, dup, h, and which are inside."""
    inside = (t < rows)[:, None, None] & real[None, :, :]
    dh = tl.load(dh_ptr + (t[:, None, None] * I + c[None, :, :]), mask=inside, other=0.0).to(tl.float32)
    known = (t < rows)[:, None] & (g < groups)[None, :]
    maxima = amax_ptr + (t[:, None] * (2 * n) + g[None, :])
    gate_amax = tl.load(maxima, mask=known, other=0.0).to(tl.float32)[:, :, None]
    up_amax = tl.load(maxima + n, mask=known, other=0.0).to(tl.float32)[:, :, None]
    codes = codes_ptr + (t[:, None, None] * (2 * I) + c[None, :, :])
    gate = decode(tl.load(codes, mask=inside, other=0.0), gate_amax, CODE)
    up = decode(tl.load(codes + I, mask=inside, other=0.0), up_amax, CODE)
    s = sigmoid(gate)
    return dh * up * s * (1.0 + gate * (1.0 - s)), dh * gate * s, gate * s * up, inside


@kernel
def _swiglu_product_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, 2I) 8-bit
    amax_ptr,  # (T, 2, n) BF16
    scale_ptr,  # 0-d FP32: scale of h
    out_ptr,  # (T, 2I): gradient of gate and up, if VALUES
    h_t_ptr,  # (I, P / 2) int16: pairs of E4M3
    result_ptr,  # 0-d int32: bits of max |gradient|, unless VALUES
    T,
    I,  # noqa: E741
    P,
    n,
    VALUES: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
    BT: tl.constexpr,
):
    t0, g0 = tl.program_id(0) * BT, tl.program_id(1) * NG
    pair, g, i = tl.arange(0, BT // 2), tl.arange(0, NG), tl.arange(0, GP)
    c = g[:, None] * G + i[None, :]  # (NG, GP), from column g0 * G on
    real = (c < I - g0 * G) & (i < G)[None, :]
    dh_ptr += t0.to(tl.int64) * I + g0 * G
    start = t0.to(tl.int64) * 2 * I + g0 * G
    amax_ptr += t0.to(tl.int64) * 2 * n + g0
    rows, groups, t = T - t0, n - g0, 2 * pair
    a0, b0, h0, in0 = gradient_rows(dh_ptr, codes_ptr + start, amax_ptr, t, c, g, real, rows, groups, I, n, CODE)
    a1, b1, h1, in1 = gradient_rows(dh_ptr, codes_ptr + start, amax_ptr, t + 1, c, g, real, rows, groups, I, n, CODE)
    inverse = inverse_of(tl.load(scale_ptr))
    words = pack_rows(tl.where(in0, h0 * inverse, 0.0), tl.where(in1, h1 * inverse, 0.0), tl.float8e4nv)
    inside_t = real[:, :, None] & (pair < (P - t0) // 2)[None, None, :]
    h_t_ptr += (g0 * G).to(tl.int64) * (P // 2) + t0 // 2
    tl.store(h_t_ptr + (c[:, :, None] * (P // 2) + pair[None, None, :]), tl.permute(words, (1, 2, 0)), mask=inside_t)
    if VALUES:
        target = out_ptr + start + (t[:, None, None] * (2 * I) + c[None, :, :])
        tl.store(target, a0.to(out_ptr.dtype.element_ty), mask=in0)
        tl.store(target + I, b0.to(out_ptr.dtype.element_ty), mask=in0)
        tl.store(target + 2 * I, a1.to(out_ptr.dtype.element_ty), mask=in1)
        tl.store(target + 3 * I, b1.to(out_ptr.dtype.element_ty), mask=in1)
    else:
        # Outside everything is zero: dh is loaded as zero there.
        top = larger(larger(tl.abs(a0), tl.abs(b0)), larger(tl.abs(a1), tl.abs(b1)))
        atomic_amax(result_ptr, max_magnitude(max_magnitude(max_magnitude(top, 2), 1), 0))


@triton.jit
def _store_pair(even, odd, out_ptr, out_t_ptr, stride, offsets, offsets_t, in0, in1, inside_t):
    """Rows 2k and 2k + 1 (BT / 2, NG, GP), zero outside: FP8 as they lie, and transposed (NG, GP, BT / 2)."""
    even, odd = tl.where(in0, even, 0.0), tl.where(in1, odd, 0.0)
    tl.store(out_ptr + offsets, to_float8(even, out_ptr.dtype.element_ty), mask=in0)
    tl.store(out_ptr + stride + offsets, to_float8(odd, out_ptr.dtype.element_ty), mask=in1)
    words = tl.permute(pack_rows(even, odd, out_ptr.dtype.element_ty), (1, 2, 0))
    tl.store(out_t_ptr + offsets_t, words, mask=inside_t)


@kernel
def _swiglu_gradient_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, 2I) 8-bit
    group_amax_ptr,  # (T, 2, n) BF16
    amax_ptr,  # 0-d FP32: max |gradient|
    out_ptr,  # (T, 2I) FP8: gradient of gate and up
    out_t_ptr,  # (2I, P / 2) int16: pairs of FP8
    scale_ptr,  # 0-d FP32
    T,
    I,  # noqa: E741
    P,
    n,
    INVERSE_MAX: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
    BT: tl.constexpr,
):
    t0, g0 = tl.program_id(0) * BT, tl.program_id(1) * NG
    pair, g, i = tl.arange(0, BT // 2), tl.arange(0, NG), tl.arange(0, GP)
    c = g[:, None] * G + i[None, :]  # (NG, GP), from column g0 * G on
    real = (c < I - g0 * G) & (i < G)[None, :]
    dh_ptr += t0.to(tl.int64) * I + g0 * G
    start = t0.to(tl.int64) * 2 * I + g0 * G
    group_amax_ptr += t0.to(tl.int64) * 2 * n + g0
    rows, groups, t = T - t0, n - g0, 2 * pair
    a0, b0, _, in0 = gradient_rows(dh_ptr, codes_ptr + start, group_amax_ptr, t, c, g, real, rows, groups, I, n, CODE)
    a1, b1, _, in1 = gradient_rows(
        dh_ptr, codes_ptr + start, group_amax_ptr, t + 1, c, g, real, rows, groups, I, n, CODE
    )
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) == 0)
    inverse = inverse_of(scale)
    offsets = t[:, None, None] * (2 * I) + c[None, :, :]
    offsets_t = c[:, :, None] * (P // 2) + pair[None, None, :]
    inside_t = real[:, :, None] & (pair < (P - t0) // 2)[None, None, :]
    out_ptr += start
    out_t_ptr += (g0 * G).to(tl.int64) * (P // 2) + t0 // 2
    stride = 2 * I
    _store_pair(a0 * inverse, a1 * inverse, out_ptr, out_t_ptr, stride, offsets, offsets_t, in0, in1, inside_t)
    out_ptr += I
    out_t_ptr += I.to(tl.int64) * (P // 2)
    _store_pair(b0 * inverse, b1 * inverse, out_ptr, out_t_ptr, stride, offsets, offsets_t, in0, in1, inside_t)


# (tokens, columns) of a tile and its warps, by measurement (docs/log-kernels.md).
PRODUCT_TILE, PRODUCT_WARPS = (16, 128), 4
GRADIENT_TILE, GRADIENT_WARPS = (64, 128), 8


def _launch_product(
    dh: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    scale: Tensor,
    out: Optional[Tensor],
    code: str,
    group_size: int,
    padded: int,
) -> tuple[Tensor, Tensor]:
    """max |gradient| (garbage if the gradient itself goes to `out`) and h as transposed E4M3 operand (I, padded)."""
    tokens, width = dh.shape
    bits = torch.zeros((), dtype=torch.int32, device=dh.device)
    h_t = torch.empty((width, padded), dtype=E4M3.dtype, device=dh.device)
    n, gp = group_amax.shape[2], power_of_2(group_size)
    count = max(PRODUCT_TILE[1] // gp, 1)
    with on_device(dh):
        _swiglu_product_kernel[(cdiv(padded, PRODUCT_TILE[0]), cdiv(n, count))](
            dh, codes, group_amax, scale, dh if out is None else out, h_t.view(torch.int16), bits, tokens, width,
            padded, n, out is not None, group_size, gp, CODES[code], count, PRODUCT_TILE[0],
            num_warps=PRODUCT_WARPS, **EXACT,
        )  # fmt: skip
    return bits.view(torch.float32), h_t


def swiglu_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, scale: Tensor, code: str, group_size: int, padded: int
) -> tuple[Tensor, Tensor]:
    """Gradient of gate_up (T, 2I) in dh's dtype; h rebuilt, transposed E4M3 (I, padded)."""
    out = torch.empty_like(codes, dtype=dh.dtype)
    return out, _launch_product(dh.contiguous(), codes, group_amax, scale, out, code, group_size, padded)[1]


def swiglu_backward_amax(
    dh: Tensor, codes: Tensor, group_amax: Tensor, scale: Tensor, code: str, group_size: int, padded: int
) -> tuple[Tensor, Tensor]:
    """max |gradient of gate_up|, 0-d FP32; h rebuilt, transposed E4M3 (I, padded)."""
    return _launch_product(dh.contiguous(), codes, group_amax, scale, None, code, group_size, padded)


def swiglu_backward_quantize(
    dh: Tensor, codes: Tensor, group_amax: Tensor, amax: Tensor, fmt: str, code: str, group_size: int, padded: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of gate_up in FP8: (T, 2I), transposed (2I, padded), and its scale."""
    dh = dh.contiguous()
    out = torch.empty(codes.shape, dtype=FLOAT8[fmt].dtype, device=dh.device)
    out_t = torch.empty((codes.shape[1], padded), dtype=out.dtype, device=dh.device)
    scale = torch.empty_like(amax)
    n, gp = group_amax.shape[2], power_of_2(group_size)
    count = max(GRADIENT_TILE[1] // gp, 1)
    with on_device(dh):
        _swiglu_gradient_kernel[(cdiv(padded, GRADIENT_TILE[0]), cdiv(n, count))](
            dh, codes, group_amax, amax, out, out_t.view(torch.int16), scale, *dh.shape, padded, n,
            inverse_max(fmt), group_size, gp, CODES[code], count, GRADIENT_TILE[0],
            num_warps=GRADIENT_WARPS, **EXACT,
        )  # fmt: skip
    return out, out_t, scale
