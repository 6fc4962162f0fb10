"""Kernels of kernels/quantize.py for kept tensors: 8-bit codes per group, with the vector taken out before.

All are bound by memory. With N elements of 2 bytes the bytes moved are: group_encode and group_decode 3N; requantize_t
2N (codes read, FP8 written).

Decoding takes the tensor's T * n groups as one list, NG of them a program, one group along a tile's second axis. The
others take tiles of (BT tokens, NG groups): encoding reads the center of so many columns once for all of them,
requantize_t writes its tiles transposed.

Legend: T tokens (rows), C columns, P padded tokens, G group size, GP = G rounded up to a power of 2, n = ceil(C / G).
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import E4M3, group_code
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    atomic_amax,
    decode,
    encode,
    inverse_of,
    max_magnitude,
    pack_rows,
    power_of_2,
)
from overcoat.kernels.gpu.hardware import to_float32
from overcoat.kernels.gpu.launch import cdiv, dense, dense_rows, kernel, on_device
from overcoat.kernels.gpu.tiles import decode_rows, group_columns, listed_groups, store_transposed

# Elements of one program that encodes or decodes, and columns of one that encodes (a group's at least).
GROUP_TILE, STRIP = 4096, 256


@kernel
def _token_center_kernel(
    x_ptr,  # (T, C)
    center_ptr,  # (C,) FP32
    stride,  # of a row
    T,
    C,
    step,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros((BT, BC), tl.float32)
    for t0 in range(0, T, BT * step):
        t = t0 + tl.arange(0, BT) * step
        inside = (t < T)[:, None] & (c < C)[None, :]
        total += tl.load(x_ptr + t.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(center_ptr + c, tl.sum(total, 0) / tl.cdiv(T, step), mask=c < C)


def token_center(x: Tensor, step: int) -> Tensor:
    """Mean over every `step`-th row of x (T, C), FP32 (C,); summed in another order than the reference's."""
    x = dense_rows(x)
    tokens, columns = x.shape
    center = torch.empty(columns, dtype=torch.float32, device=x.device)
    with on_device(x):
        _token_center_kernel[(cdiv(columns, 64),)](x, center, x.stride(0), tokens, columns, max(step, 1), 32, 64)
    return center


@triton.jit
def _raise(amax_ptr, seen, top):
    """`atomic_amax` if top exceeds what was `seen` there: once the first programs have found large values, few do.

    Warps of a program may have seen different values: nothing that they would wait for each other in may stand here.
    """
    if top.to(tl.int32, bitcast=True) > seen:
        atomic_amax(amax_ptr, top)


@kernel
def _group_encode_kernel(
    x_ptr,  # (T, C)
    center_ptr,  # (C,) FP32, if HAS_CENTER
    codes_ptr,  # (T, C) 8-bit
    group_amax_ptr,  # (T, n) BF16
    amax_ptr,  # int32: bits of max |x|, if WANT_AMAX
    T,
    C,
    n,
    strips,  # ceil(n / NG)
    HAS_CENTER: tl.constexpr,
    WANT_AMAX: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
    BT: tl.constexpr,
):
    tile = tl.program_id(0) // strips
    g0, t0 = (tl.program_id(0) - tile * strips) * NG, tile.to(tl.int64) * BT
    g, c, real = group_columns(g0, C, G, GP, NG)
    t = tl.arange(0, BT)
    known = (t < T - t0)[:, None] & (g < n - g0)[None, :]
    inside = (t < T - t0)[:, None, None] & real[None, :, :]
    start, offsets = t0 * C + g0 * G, t[:, None, None] * C + c[None, :, :]
    if WANT_AMAX:
        seen = tl.load(amax_ptr, cache_modifier=".cg")
    x = tl.load(x_ptr + start + offsets, mask=inside, other=0.0)
    if WANT_AMAX and HAS_CENTER:
        x = to_float32(x)
        top = max_magnitude(tl.reshape(x, (BT * NG * GP,), can_reorder=True), 0)
    else:
        x = x.to(tl.float32)  # BF16 until it is needed again: with no center 40 registers instead of 56
    if HAS_CENTER:
        x -= tl.load(center_ptr + g0 * G + c, mask=real, other=0.0)[None, :, :]
    exact = max_magnitude(x, 2)
    if WANT_AMAX and HAS_CENTER:
        _raise(amax_ptr, seen, top)
    amax = exact.to(tl.bfloat16)
    tl.store(group_amax_ptr + t0 * n + g0 + t[:, None] * n + g[None, :], amax, mask=known)
    tl.store(codes_ptr + start + offsets, encode(x, amax.to(tl.float32)[:, :, None], CODE), mask=inside)
    if WANT_AMAX and not HAS_CENTER:
        _raise(amax_ptr, seen, max_magnitude(max_magnitude(exact, 1), 0))


def group_encode(
    x: Tensor, center: Optional[Tensor], code: str, group_size: int, want_amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of x (T, C) minus center (C,), their BF16 maxima (T, n), and max |x| (garbage unless wanted)."""
    x, center = dense(x, center)
    tokens, columns = x.shape
    n, gp = cdiv(columns, group_size), power_of_2(group_size)
    codes = torch.empty(x.shape, dtype=group_code(code).dtype, device=x.device)
    group_amax = torch.empty((tokens, n), dtype=torch.bfloat16, device=x.device)
    amax = (torch.zeros if want_amax else torch.empty)((), dtype=torch.int32, device=x.device)
    count = max(STRIP // gp, 1)
    rows, strips = max(GROUP_TILE // (count * gp), 1), cdiv(n, count)
    with on_device(x):
        _group_encode_kernel[(cdiv(tokens, rows) * strips,)](
            x, amax if center is None else center, codes, group_amax, amax, tokens, columns, n, strips,
            center is not None, want_amax, group_size, gp, CODES[code], count, rows, num_warps=4, **EXACT,
        )  # fmt: skip
    return codes, group_amax, amax.view(torch.float32)


@kernel
def _group_decode_kernel(
    codes_ptr,  # (T, C) 8-bit
    amax_ptr,  # (T * n,) BF16
    center_ptr,  # (C,) FP32, if HAS_CENTER
    out_ptr,  # (T, C)
    groups,  # T * n
    n,
    C,
    HAS_CENTER: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
):
    group, row, known, column, inside = listed_groups(groups, n, C, G, GP, NG)
    offsets = row.to(tl.int64)[:, None] * C + column
    codes = tl.load(codes_ptr + offsets, mask=inside, other=0.0)
    amax = tl.load(amax_ptr + group, mask=known, other=0.0).to(tl.float32)
    x = decode(codes, amax[:, None], CODE)
    if HAS_CENTER:
        x += tl.load(center_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=inside)


def group_decode(
    codes: Tensor, group_amax: Tensor, center: Optional[Tensor], code: str, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Values (T, C) of codes plus center (C,), rounded to `dtype`."""
    codes, group_amax, center = dense(codes, group_amax, center)
    tokens, columns = codes.shape
    n = group_amax.shape[1]
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    padded = power_of_2(group_size)
    count = max(GROUP_TILE // padded, 1)
    with on_device(codes):
        _group_decode_kernel[(cdiv(tokens * n, count),)](
            codes, group_amax, codes if center is None else center, out, tokens * n, n, columns,
            center is not None, group_size, padded, CODES[code], count, num_warps=4, **EXACT,
        )  # fmt: skip
    return out


@kernel
def _requantize_t_kernel(
    codes_ptr,  # (T, C) 8-bit
    amax_ptr,  # (T, n) BF16
    weight_ptr,  # (C,), if HAS_WEIGHT
    bias_ptr,  # (C,), if HAS_BIAS
    scale_ptr,  # 0-d FP32
    out_t_ptr,  # (C, P / 2) int16: pairs of E4M3
    T,
    C,
    P,
    n,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CODE: tl.constexpr,
    NG: tl.constexpr,
    BT: tl.constexpr,
):
    t0, g0 = tl.program_id(0) * BT, tl.program_id(1) * NG
    pair = tl.arange(0, BT // 2)
    g, c, real = group_columns(g0, C, G, GP, NG)
    codes_ptr += t0.to(tl.int64) * C + g0 * G
    amax_ptr += t0.to(tl.int64) * n + g0
    even, inside0 = decode_rows(codes_ptr, amax_ptr, 2 * pair, c, g, real, T - t0, n - g0, C, n, CODE)
    odd, inside1 = decode_rows(codes_ptr, amax_ptr, 2 * pair + 1, c, g, real, T - t0, n - g0, C, n, CODE)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + g0 * G + c, mask=real, other=0.0).to(tl.float32)[None, :, :]
        even, odd = even * weight, odd * weight
    if HAS_BIAS:
        bias = tl.load(bias_ptr + g0 * G + c, mask=real, other=0.0).to(tl.float32)[None, :, :]
        even, odd = even + bias, odd + bias
    inverse = inverse_of(tl.load(scale_ptr))
    even, odd = tl.where(inside0, even * inverse, 0.0), tl.where(inside1, odd * inverse, 0.0)
    out_t_ptr += (g0 * G).to(tl.int64) * (P // 2) + t0 // 2
    store_transposed(pack_rows(even, odd, tl.float8e4nv), out_t_ptr, c, pair, real, (P - t0) // 2, P // 2)


def requantize_t(
    codes: Tensor,
    group_amax: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    scale: Tensor,
    code: str,
    group_size: int,
    padded: int,
) -> Tensor:
    """Codes (T, C) -> E4M3 of (decoded * weight + bias) with a given scale, transposed: (C, padded)."""
    codes, group_amax, weight, bias = dense(codes, group_amax, weight, bias)
    tokens, columns = codes.shape
    out_t = torch.empty((columns, padded), dtype=E4M3.dtype, device=codes.device)
    n, gp = group_amax.shape[1], power_of_2(group_size)
    count = max(128 // gp, 1)
    with on_device(codes):
        _requantize_t_kernel[(cdiv(padded, 64), cdiv(n, count))](
            codes, group_amax, codes if weight is None else weight, codes if bias is None else bias,
            scale, out_t.view(torch.int16),
            tokens, columns, padded, n, weight is not None, bias is not None,
            group_size, gp, CODES[code], count, 64, num_warps=4, **EXACT,
        )  # fmt: skip
    return out_t
