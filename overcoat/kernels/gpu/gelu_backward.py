"""Kernels of the backward in kernels/gelu.py: du in 16 bits, or its maximum and then straight into FP8.

Bytes moved, with V = T * I * 2:

    gelu_backward           1 V + 1/2 V read, 1 V + 1/2 V written: du, and gelu(u) rebuilt and transposed
    gelu_backward_amax      1 V read; of the 1/2 V of codes only those of tiles that may hold the maximum
    gelu_backward_quantize  1 V + 1/2 V read, 1/2 V + 1/2 V + 1/2 V written: du in both FP8 layouts, gelu(u) transposed;
                            and, with a bias, each tile's sums over its tokens, V / 16

The last two replace gelu_backward, du's sum, maximum and quantization (7 V) by 4 V: du in 16 bits never exists.
Everything equals the reference bit for bit, except the sums over tokens, which add in another order.

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
    atomic_amax,
    decode,
    inverse_max,
    inverse_of,
    max_magnitude,
    pack_rows,
    power_of_2,
    scale_of,
)
from overcoat.kernels.gpu.gelu import gelu, is_tanh
from overcoat.kernels.gpu.hardware import arrived
from overcoat.kernels.gpu.launch import cdiv, dense, kernel, on_device, registers
from overcoat.kernels.gpu.partials import sum_partials
from overcoat.kernels.gpu.tiles import (
    group_columns,
    listed_groups,
    listed_magnitude,
    load_rows,
    store_quad_rows,
    store_quads,
    store_transposed,
    where_padded,
    whole_groups,
)
from overcoat.kernels.quantize import padded_tokens

# Elements of a program that looks for max |du|.
AMAX_TILE = 2048
# (tokens, columns) of a tile and its warps, by measurement (docs/log-kernels.md).
PRODUCT_TILE, PRODUCT_WARPS = (32, 128), 4
GRADIENT_TILE, GRADIENT_WARPS = (32, 128), 4
# There, columns next to each other in a thread: of more there are more numbers to put together, for the sums over
# tokens; and the registers of a thread.
GRADIENT_COLUMNS, GRADIENT_REGISTERS = 4, 80
# More than |gelu'| in both forms: 1.12890 (erf) and 1.12899 (tanh), either right to 5e-6. A product with it bounds the
# product with gelu', as both are rounded alike.
SLOPE_BOUND = tl.constexpr(1.13)


# ---- the largest gradient -------------------------------------------------------------------------------------------


@kernel
def _gelu_gradient_amax_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, I) 8-bit
    group_amax_ptr,  # (T, n) BF16
    top_ptr,  # 0-d int32: bits of max |du|
    groups,  # T * n
    n,
    I,  # noqa: E741
    TANH: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
    WHOLE: tl.constexpr,
):
    # From L2: what this multiprocessor's own cache holds is as old as its first program.
    seen = tl.load(top_ptr, cache_modifier=".cg")
    group = tl.program_id(0) * NG + tl.arange(0, NG)
    group_amax = tl.load(group_amax_ptr + group, mask=group < groups, other=0.0).to(tl.float32)
    bound = listed_magnitude(dh_ptr, groups, n, I, G, GP, NG, WHOLE, None) * SLOPE_BOUND
    # Where du may be NaN the bound is, whose bits are the largest.
    bound = tl.where((bound < float("inf")) & (max_magnitude(group_amax, 0) < float("inf")), bound, float("nan"))
    # Once the first programs have found large values few tiles can hold a larger one, and only those read their codes.
    # Which do depends on who comes first; the result does not.
    if bound.to(tl.int32, bitcast=True) > seen:
        # dh once more: the many programs that never come here need no registers for it.
        group, row, known, column, inside = listed_groups(groups, n, I, G, GP, NG)
        offsets = row.to(tl.int64)[:, None] * I + column
        dh = tl.load(dh_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        group_amax = tl.load(group_amax_ptr + group, mask=known, other=0.0).to(tl.float32)
        u = decode(tl.load(codes_ptr + offsets, mask=inside, other=0.0), group_amax[:, None], CODE)
        _, slope = gelu(u, TANH)
        atomic_amax(top_ptr, max_magnitude(max_magnitude(dh * slope, 1), 0))  # zero outside, where dh is


def gelu_backward_amax(
    dh: Tensor, codes: Tensor, group_amax: Tensor, approximate: str, code: str, group_size: int
) -> Tensor:
    """max |du|, 0-d FP32."""
    dh, codes, group_amax = dense(dh, codes, group_amax)
    tokens, width = dh.shape
    n, gp = group_amax.shape[1], power_of_2(group_size)
    top = torch.zeros((), dtype=torch.int32, device=dh.device)
    count = max(AMAX_TILE // gp, 1)
    with on_device(dh):
        _gelu_gradient_amax_kernel[(cdiv(tokens * n, count),)](
            dh, codes, group_amax, top, tokens * n, n, width,
            is_tanh(approximate), group_size, gp, CODES[code], count, whole_groups(dh, group_size),
            num_warps=1, **EXACT,  # of several, some might see what others do not: swiglu.py
        )  # fmt: skip
    return top.view(torch.float32)


# ---- gradient and operands ------------------------------------------------------------------------------------------


@triton.jit
def load_operands(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n):  # noqa: E741
    """Rows t of a tile (BT, NG, GP), of which `rows` and `groups` exist: dh, u's codes, their maxima (BT, NG, 1), and
    which are inside."""
    codes, amax, inside = load_rows(codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n)
    dh = tl.load(dh_ptr + (t[:, None, None] * I + c[None, :, :]), mask=inside, other=0.0)
    return dh, codes, amax.to(tl.float32)[:, :, None], inside


@triton.jit
def gradient_of(operands, awaited, CODE: tl.constexpr, TANH: tl.constexpr):
    """du, h of what `load_operands` gave, not before the `awaited` operands' dh is there; and which are inside."""
    dh, codes, amax, inside = operands
    h, slope = gelu(decode(arrived(codes, awaited[0]), amax, CODE), TANH)
    return dh.to(tl.float32) * slope, h, inside


@triton.jit
def gradient_quads(
    dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n, CODE: tl.constexpr, TANH: tl.constexpr  # noqa: E741
):  # fmt: skip
    """Rows t to t + 3: four of du, of h, and of which are inside."""
    x0 = load_operands(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n)
    x1 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 1, c, g, real, rows, groups, I, n)
    x2 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 2, c, g, real, rows, groups, I, n)
    x3 = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 3, c, g, real, rows, groups, I, n)
    d0, h0, in0 = gradient_of(x0, x3, CODE, TANH)
    d1, h1, in1 = gradient_of(x1, x2, CODE, TANH)
    d2, h2, in2 = gradient_of(x2, x1, CODE, TANH)
    d3, h3, in3 = gradient_of(x3, x0, CODE, TANH)
    return (d0, d1, d2, d3), (h0, h1, h2, h3), (in0, in1, in2, in3)


@kernel
def _gelu_product_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, I) 8-bit
    amax_ptr,  # (T, n) BF16
    scale_ptr,  # 0-d FP32: scale of h
    out_ptr,  # (T, I): du
    h_t_ptr,  # (I, P / 2) int16: pairs of E4M3
    T,
    I,  # noqa: E741
    P,
    n,
    TANH: tl.constexpr,
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
    start = t0.to(tl.int64) * I + g0 * G
    dh_ptr += start
    codes_ptr += start
    amax_ptr += t0.to(tl.int64) * n + g0
    rows, groups, t = T - t0, n - g0, 2 * pair
    even = load_operands(dh_ptr, codes_ptr, amax_ptr, t, c, g, real, rows, groups, I, n)
    odd = load_operands(dh_ptr, codes_ptr, amax_ptr, t + 1, c, g, real, rows, groups, I, n)
    # Crosswise, so that all loads are under way before the arithmetic on any begins.
    d0, h0, in0 = gradient_of(even, odd, CODE, TANH)
    d1, h1, in1 = gradient_of(odd, even, CODE, TANH)
    offsets = t[:, None, None] * I + c[None, :, :]
    inverse = inverse_of(tl.load(scale_ptr))
    h0, h1 = where_padded(h0 * inverse, in0, PADDED), where_padded(h1 * inverse, in1, PADDED)
    words = pack_rows(h0, h1, tl.float8e4nv)
    h_t_ptr += (g0 * G).to(tl.int64) * (P // 2) + t0 // 2
    store_transposed(words, h_t_ptr, c, pair, real, (P - t0) // 2, P // 2)
    target = out_ptr + start + offsets
    tl.store(target, d0.to(out_ptr.dtype.element_ty), mask=in0)
    tl.store(target + I, d1.to(out_ptr.dtype.element_ty), mask=in1)


def gelu_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, scale: Tensor, approximate: str, code: str, group_size: int
) -> tuple[Tensor, Tensor]:
    """du (T, I) in dh's dtype; h rebuilt, transposed E4M3 (I, P)."""
    dh, codes, group_amax = dense(dh, codes, group_amax)
    (tokens, width), padded = dh.shape, padded_tokens(dh.shape[0])
    out = torch.empty_like(dh)
    h_t = torch.empty((width, padded), dtype=E4M3.dtype, device=dh.device)
    n, gp = group_amax.shape[1], power_of_2(group_size)
    count = max(PRODUCT_TILE[1] // gp, 1)
    with on_device(dh):
        _gelu_product_kernel[(cdiv(padded, PRODUCT_TILE[0]), cdiv(n, count))](
            dh, codes, group_amax, scale, out, h_t.view(torch.int16), tokens, width, padded, n,
            is_tanh(approximate), group_size, gp, CODES[code], count, PRODUCT_TILE[0], padded > tokens,
            num_warps=PRODUCT_WARPS, **EXACT,
        )  # fmt: skip
    return out, h_t


@kernel
def _gelu_gradient_kernel(
    dh_ptr,  # (T, I)
    codes_ptr,  # (T, I) 8-bit
    group_amax_ptr,  # (T, n) BF16
    h_scale_ptr,  # 0-d FP32: scale of h
    amax_ptr,  # 0-d FP32: max |du|
    out_ptr,  # (T, I) FP8: du
    out_t_ptr,  # (I, P / 4) int32: four FP8 each
    scale_ptr,  # 0-d FP32: scale of du
    h_t_ptr,  # (I, P / 4) int32: four E4M3 each
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
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    t0, g0 = tl.program_id(0) * BT, tl.program_id(1) * NG
    quad = tl.arange(0, BT // 4)
    g, c, real = group_columns(g0, I, G, GP, NG, COLUMNS)
    start = t0.to(tl.int64) * I + g0 * G
    dh_ptr += start
    codes_ptr += start
    group_amax_ptr += t0.to(tl.int64) * n + g0
    t = 4 * quad
    d, h, inside = gradient_quads(dh_ptr, codes_ptr, group_amax_ptr, t, c, g, real, T - t0, n - g0, I, n, CODE, TANH)
    if SUMS:
        partial_ptr += tl.program_id(0).to(tl.int64) * I + g0 * G
        tl.store(partial_ptr + c, tl.sum((d[0] + d[1]) + (d[2] + d[3]), 0), mask=real)
    quads, stride_t = (P - t0) // 4, P // 4
    first = (g0 * G).to(tl.int64) * stride_t + t0 // 4
    inverse = inverse_of(tl.load(h_scale_ptr))
    store_quads(h, inside, inverse, h_t_ptr + first, c, quad, real, quads, stride_t, PADDED, tl.float8e4nv)
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) == 0)
    inverse = inverse_of(scale)
    store_quad_rows(d, inside, inverse, out_ptr + start, I, t[:, None, None] * I + c[None, :, :])
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    store_quads(d, inside, inverse, out_t_ptr + first, c, quad, real, quads, stride_t, PADDED, TYPE)


def gelu_backward_quantize(
    dh: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    scale: Tensor,
    amax: Tensor,
    fmt: str,
    has_bias: bool,
    approximate: str,
    code: str,
    group_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """du in FP8: (T, I), transposed (I, P), its scale; its sum over tokens (I,) or (0,) FP32; h (I, P) E4M3."""
    dh, codes, group_amax = dense(dh, codes, group_amax)
    (tokens, width), padded = dh.shape, padded_tokens(dh.shape[0])
    out = torch.empty(dh.shape, dtype=FLOAT8[fmt].dtype, device=dh.device)
    out_t = torch.empty((width, padded), dtype=out.dtype, device=dh.device)
    h_t = torch.empty((width, padded), dtype=E4M3.dtype, device=dh.device)
    d_scale = torch.empty_like(amax)
    n, gp = group_amax.shape[1], power_of_2(group_size)
    count, turns = max(GRADIENT_TILE[1] // gp, 1), cdiv(padded, GRADIENT_TILE[0])
    partial = torch.empty((turns if has_bias else 0, width), dtype=torch.float32, device=dh.device)
    with on_device(dh):
        _gelu_gradient_kernel[(turns, cdiv(n, count))](
            dh, codes, group_amax, scale, amax, out, out_t.view(torch.int32), d_scale, h_t.view(torch.int32),
            partial if has_bias else d_scale, tokens, width, padded, n, inverse_max(fmt), has_bias,
            is_tanh(approximate), group_size, gp, CODES[code], count, GRADIENT_TILE[0], padded > tokens,
            GRADIENT_COLUMNS, num_warps=GRADIENT_WARPS, maxnreg=registers(GRADIENT_REGISTERS, dh, group_size), **EXACT,
        )  # fmt: skip
    return out, out_t, d_scale, sum_partials(partial)[0] if has_bias else partial.view(0), h_t
