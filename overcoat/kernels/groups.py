"""Kept tensors: 8-bit codes per 1xG group; a weight gradient's operand from them; and the vector taken out of v.

All kernels are bound by memory. With N elements of 2 bytes the bytes moved are: group_encode and group_decode 3N;
requantize_t 2N (codes read, FP8 written).

Decoding takes the tensor's T * n groups as one list, NG of them a program, one group along a tile's second axis. The
others take tiles of (BT tokens, NG groups): requantize_t writes its tiles transposed.

Legend: T tokens (rows), C columns, P = T rounded up to a multiple of 16, G group size, GP = G rounded up to a power of
2, n = ceil(C / G).
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import E4M3, Quantized, cast_float8, decode_groups, empty_groups, encode_groups, group_code
from overcoat.kernels.codes import CODES, decode, encode
from overcoat.kernels.device import EXACT, inverse_of, max_magnitude, pack_rows, power_of_2
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, dense, dense_rows, kernel
from overcoat.kernels.op import op
from overcoat.kernels.quantize import amax, empty_both, transpose_padded
from overcoat.kernels.tiles import decode_rows, group_columns, listed_groups, raise_amax, store_transposed

CENTER_ROWS = 256
# Elements of one program that encodes or decodes, and columns of one that encodes (a group's at least).
GROUP_TILE, STRIP = 4096, 256


# ---- center ----------------------------------------------------------------------------------------------------------


@op
def token_center(x: Tensor) -> Tensor:
    """What all tokens have in common: the mean over at most 256 evenly spaced rows of x (T, C), FP32 (C,).

    Biases and outlier channels add the same vector to every token's v. It cancels in attention's gradients
    (softmax does not see it), its quantization error would not. Any vector decodes exactly, so a sample will do.
    """
    step = max(1, -(-x.shape[0] // CENTER_ROWS))
    return x[::step].float().mean(0)


@token_center.fake  # compiled code must not depend on how many rows the sample has
def _(x):
    return x.new_empty(x.shape[1:], dtype=torch.float32)


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


@token_center.cuda
def _(x):
    x, step = dense_rows(x), max(-(-x.shape[0] // CENTER_ROWS), 1)
    tokens, columns = x.shape
    center = x.new_empty(columns, dtype=torch.float32)
    _token_center_kernel[(cdiv(columns, 64),)](x, center, x.stride(0), tokens, columns, step, 32, 64)
    return center


# ---- encode ----------------------------------------------------------------------------------------------------------


@op
def group_encode(x: Tensor, code: str, group_size: int) -> Tuple[Tensor, Tensor]:
    """Kept-tensor codes (T, C) and BF16 group maxima (T, n) of x (T, C)."""
    data, scale = encode_groups(x.contiguous(), code, group_size)
    return data, scale


@group_encode.fake
def _(x, code, group_size):
    return empty_groups(x, code, group_size)


@op
def group_encode_amax(x: Tensor, code: str, group_size: int) -> Tuple[Tensor, Tensor, Tensor]:
    """`group_encode`, and max |x| as 0-d FP32 from the same pass: x is kept in groups and is a GEMM's operand."""
    return *group_encode.reference(x, code, group_size), amax.reference(x)


@group_encode_amax.fake
def _(x, code, group_size):
    return *empty_groups(x, code, group_size), x.new_empty((), dtype=torch.float32)


@kernel
def _group_encode_kernel(
    x_ptr,  # (T, C)
    codes_ptr,  # (T, C) 8-bit
    group_amax_ptr,  # (T, n) BF16
    amax_ptr,  # int32: bits of max |x|, if WANT_AMAX
    T,
    C,
    n,
    strips,  # ceil(n / NG)
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
    x = tl.load(x_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
    exact = max_magnitude(x, 2)
    amax = exact.to(tl.bfloat16)
    tl.store(group_amax_ptr + t0 * n + g0 + t[:, None] * n + g[None, :], amax, mask=known)
    tl.store(codes_ptr + start + offsets, encode(x, amax.to(tl.float32)[:, :, None], CODE), mask=inside)
    if WANT_AMAX:
        raise_amax(amax_ptr, seen, max_magnitude(max_magnitude(exact, 1), 0))


def _launch_encode(x: Tensor, code: str, group_size: int, want_amax: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and maxima of x (T, C), and max |x| (garbage unless wanted)."""
    x = x.contiguous()
    (tokens, columns), gp = x.shape, power_of_2(group_size)
    codes, group_amax = empty_groups(x, code, group_size)
    n = group_amax.shape[1]
    amax = (x.new_zeros if want_amax else x.new_empty)((), dtype=torch.int32)
    count = max(STRIP // gp, 1)
    rows, strips = max(GROUP_TILE // (count * gp), 1), cdiv(n, count)
    _group_encode_kernel[(cdiv(tokens, rows) * strips,)](
        x, codes, group_amax, amax, tokens, columns, n, strips,
        want_amax, group_size, gp, CODES[code], count, rows, num_warps=4, **EXACT,
    )  # fmt: skip
    return codes, group_amax, amax.view(torch.float32)


@group_encode.cuda
def _(x, code, group_size):
    return _launch_encode(x, code, group_size, False)[:2]


@group_encode_amax.cuda
def _(x, code, group_size):
    return _launch_encode(x, code, group_size, True)


# ---- decode ----------------------------------------------------------------------------------------------------------


@op
def group_decode(codes: Tensor, group_amax: Tensor, code: str, group_size: int, dtype: torch.dtype) -> Tensor:
    """Undo `group_encode`, rounded to `dtype`."""
    return decode_groups(Quantized(codes, group_amax), code, group_size, dtype)


@group_decode.fake
def _(codes, group_amax, code, group_size, dtype):
    return codes.new_empty((codes.shape[0], group_code(code).columns(codes)), dtype=dtype)


@kernel
def _group_decode_kernel(
    codes_ptr,  # (T, C) 8-bit
    amax_ptr,  # (T * n,) BF16
    out_ptr,  # (T, C)
    groups,  # T * n
    n,
    C,
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
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=inside)


@group_decode.cuda
def _(codes, group_amax, code, group_size, dtype):
    codes, group_amax = dense(codes, group_amax)
    (tokens, n), padded = group_amax.shape, power_of_2(group_size)
    out = torch.empty((tokens, group_code(code).columns(codes)), dtype=dtype, device=codes.device)
    count = max(GROUP_TILE // padded, 1)
    _group_decode_kernel[(cdiv(tokens * n, count),)](
        codes, group_amax, out, tokens * n, n, out.shape[1], group_size, padded, CODES[code], count,
        num_warps=4, **EXACT,
    )  # fmt: skip
    return out


# ---- a weight gradient's operand -------------------------------------------------------------------------------------


@op
def requantize_t(
    codes: Tensor,
    group_amax: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    scale: Tensor,
    code: str,
    group_size: int,
) -> Tensor:
    """Kept codes (T, C) -> (decoded * weight + bias) as transposed E4M3 operand (C, P) with the forward's scale.

    With a norm's weight and bias (C,) this rebuilds the norm's output from its kept normalised value, so the forward's
    FP8 operand need not be kept; without either it serves what reads the residual stream itself.
    """
    y = decode_groups(Quantized(codes, group_amax), code, group_size)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return transpose_padded(cast_float8(y * (1.0 / scale), E4M3))


@requantize_t.fake
def _(codes, group_amax, weight, bias, scale, code, group_size):
    return empty_both(codes, "e4m3", group_code(code).columns(codes))[1]


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


@requantize_t.cuda
def _(codes, group_amax, weight, bias, scale, code, group_size):
    codes, group_amax, weight, bias = dense(codes, group_amax, weight, bias)
    out_t = empty_both(codes, "e4m3", group_code(code).columns(codes))[1]
    tokens, (columns, padded) = codes.shape[0], out_t.shape
    n, gp = group_amax.shape[1], power_of_2(group_size)
    count = max(128 // gp, 1)
    _requantize_t_kernel[(cdiv(padded, 64), cdiv(n, count))](
        codes, group_amax, codes if weight is None else weight, codes if bias is None else bias,
        scale, out_t.view(torch.int16),
        tokens, columns, padded, n, weight is not None, bias is not None,
        group_size, gp, CODES[code], count, 64, num_warps=4, **EXACT,
    )  # fmt: skip
    return out_t
