"""Kernels of the backward in kernels/swiglu.py: the gradients of gate and up as they are, or straight into FP8.

Bytes moved, with V = T * I * 2 (2.69 U in Llama):

    swiglu_backward           1 V + 1 V read, 2 V + 1/2 V written
    swiglu_backward_amax      1 V read; of the 1 V of codes only those of parts of tiles that may hold the maximum
    swiglu_backward_quantize  1 V + 1 V read, 1 V + 1 V written: the gradient in both FP8 layouts; 1/2 V written: the
                              product, rebuilt and transposed

The last two replace swiglu_backward, a maximum and a quantization (10.5 V) by 5.5 V: the gradient in BF16 never exists.
Everything equals the reference bit for bit.

Legend: T tokens, I intermediate width, P padded tokens, G group size, GP = G rounded up to a power of 2,
n = ceil(I / G).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, FLOAT8
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    decode,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    pack_rows,
    power_of_2,
    raised_amax,
    scale_of,
    sigmoid,
)
from overcoat.kernels.gpu.hardware import arrived, fma
from overcoat.kernels.gpu.launch import cdiv, dense, kernel, on_device, registers
from overcoat.kernels.gpu.tiles import (
    group_columns,
    groups_from,
    listed_magnitude,
    store_quad_rows,
    store_quads,
    store_transposed,
    where_padded,
    whole_groups,
)

# Gradients whose maximum a program seeks, and those whose codes it decodes at a time (a group's at least), if any.
AMAX_TILE, AMAX_PART = 4096, 512
# (tokens, columns) of a tile and its warps, by measurement (docs/log-kernels.md).
BACKWARD_TILE, BACKWARD_WARPS = (32, 128), 8
GRADIENT_TILE, GRADIENT_WARPS = (32, 128), 8
REGISTERS = 64  # of a thread in both: four programs a multiprocessor
# silu' rises up to 2.3994, to 1.09984.
SLOPE_PEAK, SLOPE_BOUND = tl.constexpr(2.399), tl.constexpr(1.1)
# More than the rounding of the hardware's approximate instructions can add to a bound.
ROUNDING = tl.constexpr(1.0 + 2.0**-12)
# A bound from which on the products on the way to a gradient may overflow.
LARGE = tl.constexpr(1.5e38)


@triton.jit
def gradient(dh, gate, up):
    """dgate, dup and h, as `swiglu.gated_gradient` computes them."""
    s = sigmoid(gate)
    silu = gate * s
    return dh * up * fma(silu, 1.0 - s, s), dh * silu, silu * up


@triton.jit
def load_operands(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n):  # noqa: E741
    """Rows t of a tile (BT, NG, GP), of which `rows` and `groups` exist: dh, the codes of gate and of up, their maxima
    (BT, NG, 1), and which are inside."""
    inside = (t < rows)[:, None, None] & real[None, :, :]
    dh = tl.load(dh_ptr + (t[:, None, None] * I + c[None, :, :]), mask=inside, other=0.0)
    known = (t < rows)[:, None] & (g < groups)[None, :]
    maxima = amax_ptr + (t[:, None] * (2 * n) + g[None, :])
    gate_amax = tl.load(maxima, mask=known, other=0.0).to(tl.float32)[:, :, None]
    up_amax = tl.load(maxima + n, mask=known, other=0.0).to(tl.float32)[:, :, None]
    codes = codes_ptr + (t[:, None, None] * (2 * I) + c[None, :, :])
    gate, up = tl.load(codes, mask=inside, other=0.0), tl.load(codes + I, mask=inside, other=0.0)
    return dh, gate, up, gate_amax, up_amax, inside


@triton.jit
def gradient_of(operands, awaited, CODE: tl.constexpr):
    """dgate, dup, h of what `load_operands` gave, not before `awaited` operands' dh is there; and which are inside."""
    dh, gate, up, gate_amax, up_amax, inside = operands
    gate = decode(arrived(gate, awaited[0]), gate_amax, CODE)
    dgate, dup, h = gradient(dh.to(tl.float32), gate, decode(up, up_amax, CODE))
    return dgate, dup, h, inside


@triton.jit
def gradient_quads(
    dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n, CODE: tl.constexpr  # noqa: E741
):  # fmt: skip
    """Rows t to t + 3: four of dgate, of dup, of h, and of which are inside."""
    x0 = load_operands(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n)
    x1 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 1, c, g, real, rows, groups, I, n)
    x2 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 2, c, g, real, rows, groups, I, n)
    x3 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 3, c, g, real, rows, groups, I, n)
    a0, b0, h0, in0 = gradient_of(x0, x3, CODE)
    a1, b1, h1, in1 = gradient_of(x1, x2, CODE)
    a2, b2, h2, in2 = gradient_of(x2, x1, CODE)
    a3, b3, h3, in3 = gradient_of(x3, x0, CODE)
    return (a0, a1, a2, a3), (b0, b1, b2, b3), (h0, h1, h2, h3), (in0, in1, in2, in3)


@kernel
def _swiglu_backward_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, 2I) 8-bit
    amax_ptr,  # (T, 2, n) BF16
    scale_ptr,  # 0-d FP32: scale of h
    out_ptr,  # (T, 2I): gradient of gate and up
    h_t_ptr,  # (I, P / 2) int16: pairs of E4M3
    T,
    I,  # noqa: E741
    P,
    n,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
    BT: tl.constexpr,
    PADDED: tl.constexpr,
):
    t0, g0 = tl.program_id(0) * BT, tl.program_id(1) * NG
    pair = tl.arange(0, BT // 2)
    g, c, real = group_columns(g0, I, G, GP, NG)
    dh_ptr += t0.to(tl.int64) * I + g0 * G
    start = t0.to(tl.int64) * 2 * I + g0 * G
    amax_ptr += t0.to(tl.int64) * 2 * n + g0
    rows, groups, t = T - t0, n - g0, 2 * pair
    codes_ptr += start
    even = load_operands(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n)
    odd = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 1, c, g, real, rows, groups, I, n)
    a0, b0, h0, in0 = gradient_of(even, odd, CODE)
    a1, b1, h1, in1 = gradient_of(odd, even, CODE)
    inverse = inverse_of(tl.load(scale_ptr))
    h0, h1 = where_padded(h0 * inverse, in0, PADDED), where_padded(h1 * inverse, in1, PADDED)
    words = pack_rows(h0, h1, tl.float8e4nv)
    h_t_ptr += (g0 * G).to(tl.int64) * (P // 2) + t0 // 2
    store_transposed(words, h_t_ptr, c, pair, real, (P - t0) // 2, P // 2)
    target = out_ptr + start + (t[:, None, None] * (2 * I) + c[None, :, :])
    tl.store(target, a0.to(out_ptr.dtype.element_ty), mask=in0)
    tl.store(target + I, b0.to(out_ptr.dtype.element_ty), mask=in0)
    tl.store(target + 2 * I, a1.to(out_ptr.dtype.element_ty), mask=in1)
    tl.store(target + 3 * I, b1.to(out_ptr.dtype.element_ty), mask=in1)


@triton.jit
def _slope_bound(gate_amax, up_amax):
    """What |dgate| and |dup| do not exceed where |dh| is 1, from a group's max |gate| and |up|; NaN where they may be.

    With a = max |gate|: |silu(gate)| <= a sigmoid(a), and silu' is at most its value at a, or 1.1 from where it falls
    again (2.4).
    """
    s = sigmoid(gate_amax)
    slope = tl.where(gate_amax < SLOPE_PEAK, s + gate_amax * s * (1.0 - s), SLOPE_BOUND)
    bound = larger(up_amax * slope, gate_amax * s) * ROUNDING
    return tl.where(gate_amax < float("inf"), bound, float("nan"))


@triton.jit
def _bits(bound):
    """Of a bound's, as integers: as FP32 they order alike. NaN, the largest, where a gradient may be NaN or infinite:
    dh * up, which is multiplied first, overflows where the bound, at least half of it, exceeds 1.7e38.
    """
    return tl.where(bound < LARGE, bound, float("nan")).to(tl.int32, bitcast=True)


@triton.jit
def _gradient_amax(
    dh_ptr, codes_ptr, amax_ptr, first, groups, n, I,  # noqa: E741
    G: tl.constexpr, GP: tl.constexpr, CODE: tl.constexpr, NG: tl.constexpr,
):  # fmt: skip
    """max |dgate| and |dup| in NG groups from the `first` on."""
    group, row, known, column, inside = groups_from(first, groups, n, I, G, GP, NG)
    start, places = row.to(tl.int64)[:, None] * I, group + row * n
    dh = tl.load(dh_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    gate_amax = tl.load(amax_ptr + places, mask=known, other=0.0).to(tl.float32)
    up_amax = tl.load(amax_ptr + n + places, mask=known, other=0.0).to(tl.float32)
    codes = codes_ptr + 2 * start + column
    gate = decode(tl.load(codes, mask=inside, other=0.0), gate_amax[:, None], CODE)
    up = decode(tl.load(codes + I, mask=inside, other=0.0), up_amax[:, None], CODE)
    dgate, dup, _ = gradient(dh, gate, up)
    return max_magnitude(max_magnitude(larger(tl.abs(dgate), tl.abs(dup)), 1), 0)  # zero outside, where dh is


@triton.jit
def _most_promising(bits, PART: tl.constexpr):
    """The largest of groups' bounds (NG,), as integers, and the number of its part: PART neighbours are one."""
    return tl.max(tl.max(tl.reshape(bits, (bits.shape[0] // PART, PART)), 1), 0, return_indices=True)


@kernel
def _swiglu_gradient_amax_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, 2I) 8-bit
    amax_ptr,  # (T, 2, n) BF16
    top_ptr,  # 0-d int32: bits of max |gradient|
    groups,  # T * n
    n,
    I,  # noqa: E741
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
    PART: tl.constexpr,
    WHOLE: tl.constexpr,
):
    # From L2: what this multiprocessor's own cache holds is as old as its first program.
    seen = tl.load(top_ptr, cache_modifier=".cg")
    group = tl.program_id(0) * NG + tl.arange(0, NG)
    places = group + (group // n) * n  # among (T, 2, n)
    gate_amax = tl.load(amax_ptr + places, mask=group < groups, other=0.0).to(tl.float32)
    up_amax = tl.load(amax_ptr + n + places, mask=group < groups, other=0.0).to(tl.float32)
    largest = listed_magnitude(dh_ptr, groups, n, I, G, GP, NG, WHOLE, None)
    # As in the encoder: the codes are read where they may hold a larger value than those found so far. First by the
    # largest of the whole tile, which takes the fewest instructions; where that does not decide, by each group's.
    slope = _slope_bound(gate_amax, up_amax)
    if _bits(largest * max_magnitude(slope, 0)) > seen:
        bits = _bits(listed_magnitude(dh_ptr, groups, n, I, G, GP, NG, WHOLE, 1) * slope)
        most, part = _most_promising(bits, PART)
        # The most promising part first. All programs that are the first come here, as nobody has found anything yet:
        # with each part they see what the others have found in theirs.
        while most > seen:
            first = tl.program_id(0) * NG + part * PART
            found = _gradient_amax(dh_ptr, codes_ptr, amax_ptr, first, groups, n, I, G, GP, CODE, PART)
            seen = raised_amax(top_ptr, found)
            bits = tl.where(tl.arange(0, NG) // PART == part, 0, bits)
            most, part = _most_promising(bits, PART)


@kernel
def _swiglu_gradient_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, 2I) 8-bit
    group_amax_ptr,  # (T, 2, n) BF16
    h_scale_ptr,  # 0-d FP32: scale of h
    amax_ptr,  # 0-d FP32: max |gradient|
    out_ptr,  # (T, 2I) FP8: gradient of gate and up
    out_t_ptr,  # (2I, P / 4) int32: four FP8 each
    scale_ptr,  # 0-d FP32
    h_t_ptr,  # (I, P / 4) int32: four E4M3 each
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
    PADDED: tl.constexpr,
):
    t0, g0 = tl.program_id(0) * BT, tl.program_id(1) * NG
    quad = tl.arange(0, BT // 4)
    g, c, real = group_columns(g0, I, G, GP, NG)
    dh_ptr += t0.to(tl.int64) * I + g0 * G
    start = t0.to(tl.int64) * 2 * I + g0 * G
    group_amax_ptr += t0.to(tl.int64) * 2 * n + g0
    rows, groups, t = T - t0, n - g0, 4 * quad
    codes_ptr += start
    a, b, h, inside = gradient_quads(dh_ptr, codes_ptr, group_amax_ptr, t, c, g, real, rows, groups, I, n, CODE)
    quads, stride_t = (P - t0) // 4, P // 4
    first = (g0 * G).to(tl.int64) * stride_t + t0 // 4
    inverse = inverse_of(tl.load(h_scale_ptr))
    store_quads(h, inside, inverse, h_t_ptr + first, c, quad, real, quads, stride_t, PADDED, tl.float8e4nv)
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) == 0)
    inverse = inverse_of(scale)
    offsets = t[:, None, None] * (2 * I) + c[None, :, :]
    out_ptr += start
    out_t_ptr += first
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    store_quad_rows(a, inside, inverse, out_ptr, 2 * I, offsets)
    store_quads(a, inside, inverse, out_t_ptr, c, quad, real, quads, stride_t, PADDED, TYPE)
    store_quad_rows(b, inside, inverse, out_ptr + I, 2 * I, offsets)
    out_t_ptr += I.to(tl.int64) * stride_t
    store_quads(b, inside, inverse, out_t_ptr, c, quad, real, quads, stride_t, PADDED, TYPE)


def swiglu_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, scale: Tensor, code: str, group_size: int, padded: int
) -> tuple[Tensor, Tensor]:
    """Gradient of gate_up (T, 2I) in dh's dtype; h rebuilt, transposed E4M3 (I, padded)."""
    dh, codes, group_amax = dense(dh, codes, group_amax)
    out = torch.empty_like(codes, dtype=dh.dtype)
    h_t = torch.empty((dh.shape[1], padded), dtype=E4M3.dtype, device=dh.device)
    n, gp = group_amax.shape[2], power_of_2(group_size)
    count = max(BACKWARD_TILE[1] // gp, 1)
    with on_device(dh):
        _swiglu_backward_kernel[(cdiv(padded, BACKWARD_TILE[0]), cdiv(n, count))](
            dh, codes, group_amax, scale, out, h_t.view(torch.int16), *dh.shape, padded, n,
            group_size, gp, CODES[code], count, BACKWARD_TILE[0], padded > dh.shape[0], num_warps=BACKWARD_WARPS,
            maxnreg=registers(REGISTERS, dh, group_size), **EXACT,
        )  # fmt: skip
    return out, h_t


def swiglu_backward_amax(dh: Tensor, codes: Tensor, group_amax: Tensor, code: str, group_size: int) -> Tensor:
    """max |gradient of gate_up|, 0-d FP32."""
    dh, codes, group_amax = dense(dh, codes, group_amax)
    tokens, width = dh.shape
    n, gp = group_amax.shape[2], power_of_2(group_size)
    top = torch.zeros((), dtype=torch.int32, device=dh.device)
    count = max(AMAX_TILE // gp, 1)
    with on_device(dh):
        _swiglu_gradient_amax_kernel[(cdiv(tokens * n, count),)](
            dh, codes, group_amax, top, tokens * n, n, width,
            group_size, gp, CODES[code], count, max(AMAX_PART // gp, 1), whole_groups(dh, group_size),
            num_warps=1, **EXACT,  # of several, some might see what others do not: swiglu.py
        )  # fmt: skip
    return top.view(torch.float32)


def swiglu_backward_quantize(
    dh: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    scale: Tensor,
    amax: Tensor,
    fmt: str,
    code: str,
    group_size: int,
    padded: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of gate_up in FP8: (T, 2I), transposed (2I, padded), its scale; h rebuilt, transposed (I, padded)."""
    dh, codes, group_amax = dense(dh, codes, group_amax)
    out = torch.empty(codes.shape, dtype=FLOAT8[fmt].dtype, device=dh.device)
    out_t = torch.empty((codes.shape[1], padded), dtype=out.dtype, device=dh.device)
    h_t = torch.empty((dh.shape[1], padded), dtype=E4M3.dtype, device=dh.device)
    d_scale = torch.empty_like(amax)
    n, gp = group_amax.shape[2], power_of_2(group_size)
    count = max(GRADIENT_TILE[1] // gp, 1)
    with on_device(dh):
        _swiglu_gradient_kernel[(cdiv(padded, GRADIENT_TILE[0]), cdiv(n, count))](
            dh, codes, group_amax, scale, amax, out, out_t.view(torch.int32), d_scale, h_t.view(torch.int32),
            *dh.shape, padded, n, inverse_max(fmt), group_size, gp, CODES[code], count, GRADIENT_TILE[0],
            padded > dh.shape[0], num_warps=GRADIENT_WARPS,
            maxnreg=registers(REGISTERS, dh, group_size), **EXACT,
        )  # fmt: skip
    return out, out_t, d_scale, h_t
