"""Where the elements of a program's tile lie: two shapes of tile that kernels over groups share, read and written.

    a list of groups        the tensor's T * n groups in a row, NG of them a program (group_encode, swiglu_encode, ...)
    tokens by groups        BT tokens and NG groups, in pairs of rows 2k and 2k + 1 that end up transposed: the operand
                            of a weight gradient (requantize_t, swiglu_backward, gelu_backward, ...)

Legend: T tokens (rows), C columns, P padded tokens, G group size, GP = G rounded up to a power of 2, n = ceil(C / G).
"""

from __future__ import annotations

import triton
import triton.language as tl

from overcoat.kernels.gpu.common import decode, pack_rows, to_float8


@triton.jit
def load_inside(pointer, inside):
    """What lies there, 0 where not `inside`; that may be None: no mask is then taken along, no register set to zero."""
    if inside is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=inside, other=0.0)


# ---- a list of groups -------------------------------------------------------------------------------------------


@triton.jit
def listed_groups(groups, n, C, G: tl.constexpr, GP: tl.constexpr, NG: tl.constexpr):
    """This program's groups: number and row (NG,), which are `known`; columns (NG, GP), which elements are inside."""
    group = tl.program_id(0) * NG + tl.arange(0, NG)
    known, row = group < groups, group // n
    column = (group - row * n)[:, None] * G + tl.arange(0, GP)[None, :]
    return group, row, known, column, known[:, None] & (column < C) & (tl.arange(0, GP) < G)[None, :]


# ---- tokens by groups -------------------------------------------------------------------------------------------


@triton.jit
def group_columns(g0, C, G: tl.constexpr, GP: tl.constexpr, NG: tl.constexpr):
    """Numbers (NG,) and columns (NG, GP) of the groups from g0 and column g0 * G on, and which columns are real."""
    g, i = tl.arange(0, NG), tl.arange(0, GP)
    c = g[:, None] * G + i[None, :]
    return g, c, (c < C - g0 * G) & (i < G)[None, :]


@triton.jit
def decode_rows(codes_ptr, amax_ptr, t, c, g, real, rows, groups, C, n, CODE: tl.constexpr):
    """Rows t of a tile of groups (BT, NG, GP), of which `rows` and `groups` exist: values and which are inside."""
    inside = (t < rows)[:, None, None] & real[None, :, :]
    codes = tl.load(codes_ptr + (t[:, None, None] * C + c[None, :, :]), mask=inside, other=0.0)
    known = (t < rows)[:, None] & (g < groups)[None, :]
    amax = tl.load(amax_ptr + (t[:, None] * n + g[None, :]), mask=known, other=0.0)
    return decode(codes, amax.to(tl.float32)[:, :, None], CODE), inside


@triton.jit
def store_transposed(words, out_t_ptr, c, pair, real, pairs, stride):
    """Words (BT / 2, NG, GP) of two tokens each to (NG, GP, BT / 2), of which `real` columns and `pairs` exist."""
    inside = real[:, :, None] & (pair < pairs)[None, None, :]
    tl.store(out_t_ptr + (c[:, :, None] * stride + pair[None, None, :]), tl.permute(words, (1, 2, 0)), mask=inside)


@triton.jit
def store_pair(even, odd, out_ptr, out_t_ptr, stride, offsets, in0, in1, c, pair, real, pairs, stride_t):
    """Rows 2k and 2k + 1 (BT / 2, NG, GP), zero outside: FP8 as they lie, and transposed (NG, GP, BT / 2).

    Each store has conversions of its own. ptxas (12.8 and 12.9, not 13.0) drops one to two FP8 bytes whose result is
    the low half of a 32-bit word and used elsewhere as well: what is stored there is some other register's content.
    """
    even, odd = tl.where(in0, even, 0.0), tl.where(in1, odd, 0.0)
    tl.store(out_ptr + offsets, to_float8(even, out_ptr.dtype.element_ty), mask=in0)
    tl.store(out_ptr + stride + offsets, to_float8(odd, out_ptr.dtype.element_ty), mask=in1)
    words = pack_rows(even, odd, out_ptr.dtype.element_ty)
    store_transposed(words, out_t_ptr, c, pair, real, pairs, stride_t)
