"""Tiles of kernels over groups: how two shapes of tile are addressed, loaded and stored.

    a list of groups        the tensor's T * n groups as one list, NG per program (group_decode, ...)
    tokens by groups        BT tokens and NG groups, in pairs or quads of consecutive rows that are stored transposed:
                            the operand of a weight gradient (requantize_t, activation_backward, ...)

Legend: T tokens (rows), C columns, P padded tokens, G group size, GP = G rounded up to a power of 2, n = ceil(C / G).
"""

from __future__ import annotations

from overcoat.kernels.codes import decode
from overcoat.kernels.device import atomic_amax, pack_quads, to_float8
from overcoat.kernels.language import tl, triton


@triton.jit
def load_inside(pointer, inside):
    """Load elements, 0 where not `inside`; inside None: no mask."""
    if inside is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=inside, other=0.0)


@triton.jit
def raise_amax(amax_ptr, seen, top):
    """Call `atomic_amax` if top exceeds the value `seen` there, which few programs do once others have raised it.

    Warps of a program may have seen different values and branch differently, so no barrier may be inside the branch.
    """
    if top.to(tl.int32, bitcast=True) > seen.to(tl.int32, bitcast=True):
        atomic_amax(amax_ptr, top)


@triton.jit
def listed_groups(groups, n, C, G: tl.constexpr, GP: tl.constexpr, NG: tl.constexpr):
    """Return this program's groups: number, row and whether it exists (`known`), (NG,); columns, and which exist, (NG,
    GP)."""
    group = tl.program_id(0) * NG + tl.arange(0, NG)
    known, row = group < groups, group // n
    column = (group - row * n)[:, None] * G + tl.arange(0, GP)[None, :]
    return group, row, known, column, known[:, None] & (column < C) & (tl.arange(0, GP) < G)[None, :]


@triton.jit
def group_columns(g0, C, G: tl.constexpr, GP: tl.constexpr, NG: tl.constexpr, MOST: tl.constexpr = 16):
    """Return numbers (NG,) and columns (NG, GP), relative to group g0 and its first column, and which columns exist.

    A thread holds at most MOST consecutive columns. With fewer it holds more rows, and sums them without other threads.
    """
    g, i = tl.arange(0, NG), tl.arange(0, GP)
    if MOST < 16:
        i = tl.max_contiguous(i, MOST)
    c = g[:, None] * G + i[None, :]
    return g, c, (c < C - g0 * G) & (i < G)[None, :]


@triton.jit
def load_kept(codes_ptr, amax_ptr, inside, known, AXIS: tl.constexpr):
    """Load codes, and their groups' maxima in FP32 with a last axis AXIS of length 1."""
    amax = tl.load(amax_ptr, mask=known, other=0.0).to(tl.float32)
    return tl.load(codes_ptr, mask=inside, other=0.0), tl.expand_dims(amax, AXIS)


@triton.jit
def decode_rows(codes_ptr, amax_ptr, t, c, g, real, rows, groups, C, n, CODE: tl.constexpr):
    """Decode rows t of a tile (BT, NG, GP), of which `rows` and `groups` exist; return values and which are inside."""
    inside, known = (t < rows)[:, None, None] & real[None, :, :], (t < rows)[:, None] & (g < groups)[None, :]
    codes_ptr += t[:, None, None] * C + c[None, :, :]
    codes, amax = load_kept(codes_ptr, amax_ptr + (t[:, None] * n + g[None, :]), inside, known, 2)
    return decode(codes, amax, CODE), inside


@triton.jit
def store_transposed(words, out_t_ptr, c, pair, real, pairs, stride):
    """Store words (B, NG, GP) of two or four tokens each as (NG, GP, B); `real` columns and `pairs` words exist."""
    inside = real[:, :, None] & (pair < pairs)[None, None, :]
    tl.store(out_t_ptr + (c[:, :, None] * stride + pair[None, None, :]), tl.permute(words, (1, 2, 0)), mask=inside)


@triton.jit
def where_padded(x, inside, PADDED: tl.constexpr):
    """Return x with zeros outside, where padding is stored; PADDED: True if there is padding (P > T)."""
    if PADDED:
        return tl.where(inside, x, 0.0)
    return x


@triton.jit
def store_quads(
    x,  # four of (BT / 4, NG, GP): rows 4k, 4k + 1, 4k + 2, 4k + 3
    inside,  # four: which of x are
    inverse,  # 1 / scale: one, or (1, NG, GP) of each column
    out_t_ptr,  # int32: four FP8 each, row stride `stride_t`
    c,  # (NG, GP) columns
    quad,  # (BT / 4,): where among the quads
    real,  # (NG, GP): which columns exist
    quads,  # how many quads of tokens exist, padding included
    stride_t,
    PADDED: tl.constexpr,  # whether they include padding, which is zero even where a scale is not finite
    TYPE: tl.constexpr,
):
    """Store x / scale in FP8, transposed, as words of four tokens each."""
    x0, x1 = where_padded(x[0] * inverse, inside[0], PADDED), where_padded(x[1] * inverse, inside[1], PADDED)
    x2, x3 = where_padded(x[2] * inverse, inside[2], PADDED), where_padded(x[3] * inverse, inside[3], PADDED)
    store_transposed(pack_quads(x0, x1, x2, x3, TYPE), out_t_ptr, c, quad, real, quads, stride_t)


@triton.jit
def store_quad_rows(x, inside, inverse, out_ptr, stride, offsets):
    """Store x / scale in FP8 untransposed, converting again instead of using `store_quads`' results.

    A bug in ptxas (12.8 and 12.9, not 13.0): if a conversion's result is both the low half of a 32-bit word, as in
    `store_quads`, and used elsewhere, the other use stores the content of some other register.
    """
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, to_float8(x[0] * inverse, TYPE), mask=inside[0])
    tl.store(out_ptr + stride + offsets, to_float8(x[1] * inverse, TYPE), mask=inside[1])
    tl.store(out_ptr + 2 * stride + offsets, to_float8(x[2] * inverse, TYPE), mask=inside[2])
    tl.store(out_ptr + 3 * stride + offsets, to_float8(x[3] * inverse, TYPE), mask=inside[3])
