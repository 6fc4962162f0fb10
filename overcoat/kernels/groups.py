"""Encode and decode saved tensors: 8-bit codes per 1xG group; and the vector that is subtracted from attention's v.

As transposed operand: blockwise.py. Both kernels are bound by memory: with N elements of 2 bytes they move 3N bytes.
Decoding takes the tensor's T * n groups as one list, NG of them a program, one group along a tile's second axis;
encoding takes tiles of (BT tokens, NG groups).

Legend: T tokens (rows), C columns, G group size, GP = G rounded up to a power of 2, n = ceil(C / G).
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from overcoat.formats import Quantized, decode_groups, empty_groups, encode_groups, group_code
from overcoat.kernels.codes import CODES, decode, store_codes
from overcoat.kernels.device import EXACT, power_of_2
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, dense, kernel
from overcoat.kernels.op import op
from overcoat.kernels.tiles import group_columns, listed_groups, load_kept

CENTER_ROWS = 256
# Elements of one program that encodes or decodes, and columns of one that encodes (a group's at least).
GROUP_TILE, STRIP = 4096, 256


@op
def token_center(x: Tensor) -> Tensor:
    """Return the mean over at most 256 evenly spaced rows of x (T, C), FP32 (C,).

    Biases and outlier channels add the same vector to every token's v. It cancels in attention's gradients, but its
    quantization error would not. Any vector may be subtracted and added back, so a sample is enough.
    """
    step = max(1, -(-x.shape[0] // CENTER_ROWS))
    return x[::step].mean(0, dtype=torch.float32)


@token_center.fake  # compiled code must not depend on how many rows the sample has
def _(x):
    return x.new_empty(x.shape[1], dtype=torch.float32)


@op
def group_encode(x: Tensor, code: str, group_size: int) -> Tuple[Tensor, Tensor]:
    """Encode x (T, C): 8-bit codes (T, C) and BF16 group maxima (T, n)."""
    data, scale = encode_groups(x.contiguous(), code, group_size)
    return data, scale


@group_encode.fake
def _(x, code, group_size):
    return empty_groups(x, code, group_size)


@kernel
def _group_encode_kernel(
    x_ptr,  # (T, C)
    codes_ptr,  # (T, C) 8-bit
    group_amax_ptr,  # (T, n) BF16
    T, C, n,
    strips,  # ceil(n / NG)
    G: tl.constexpr, GP: tl.constexpr, CODE: tl.constexpr, NG: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // strips
    g0, t0 = (tl.program_id(0) - tile * strips) * NG, tile.to(tl.int64) * BT
    g, c, real = group_columns(g0, C, G, GP, NG)
    t = tl.arange(0, BT)
    known = (t < T - t0)[:, None] & (g < n - g0)[None, :]
    inside = (t < T - t0)[:, None, None] & real[None, :, :]
    start, offsets = t0 * C + g0 * G, t[:, None, None] * C + c[None, :, :]
    x = tl.load(x_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
    places = t0 * n + g0 + t[:, None] * n + g[None, :]
    store_codes(x, codes_ptr + start + offsets, group_amax_ptr + places, inside, known, CODE, 2)


@group_encode.cuda
def _(x, code, group_size):
    x = x.contiguous()
    (tokens, columns), gp = x.shape, power_of_2(group_size)
    codes, group_amax = empty_groups(x, code, group_size)
    n, count = group_amax.shape[1], max(STRIP // gp, 1)
    rows, strips = max(GROUP_TILE // (count * gp), 1), cdiv(n, count)
    _group_encode_kernel[(cdiv(tokens, rows) * strips,)](
        x, codes, group_amax, tokens, columns, n, strips, group_size, gp, CODES[code], count, rows,
        num_warps=4, **EXACT,
    )  # fmt: skip
    return codes, group_amax


@op
def group_decode(codes: Tensor, group_amax: Tensor, code: str, group_size: int, dtype: torch.dtype) -> Tensor:
    """Undo `group_encode`, rounded to `dtype`."""
    return decode_groups(Quantized(codes, group_amax), code, group_size, dtype)


@group_decode.fake
def _(codes, group_amax, code, group_size, dtype):
    return codes.new_empty(codes.shape[0], group_code(code).columns(codes), dtype=dtype)


@kernel
def _group_decode_kernel(
    codes_ptr,  # (T, C) 8-bit
    amax_ptr,  # (T * n,) BF16
    out_ptr,  # (T, C)
    groups,  # T * n
    n, C, G: tl.constexpr, GP: tl.constexpr, CODE: tl.constexpr, NG: tl.constexpr,
):  # fmt: skip
    group, row, known, column, inside = listed_groups(groups, n, C, G, GP, NG)
    offsets = row.to(tl.int64)[:, None] * C + column
    x = decode(*load_kept(codes_ptr + offsets, amax_ptr + group, inside, known, 1), CODE)
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
