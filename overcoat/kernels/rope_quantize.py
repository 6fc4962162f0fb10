"""Rotate the gradient of q/k/v back and write it directly in FP8, in two passes; for layers without head norms.

This is the transpose of the rotation, not the inverse: scaled RoPE variants fold a factor into cos and sin.

    (d1, d2) -> (d1 * cos1 + d2 * sin2,  d2 * cos2 - d1 * sin1)

Attention's backward returns dq, dk and dv apart; one launch takes all three, indexed by the third axis of its grid. The
first pass finds max |gradient| (and the sums over the tokens, if q, k and v have biases): each program loops over
tokens of the same NH heads. The second writes each part's columns of the fused buffer in both layouts; a tile's NH
heads share its cos and sin. Bytes moved, with V = T * (num_q + 2 num_kv) * D * 2, the fused buffer (3 U for multi-head
attention):

    qk_rope_backward_amax       1 V read
    qk_rope_backward_quantize   1 V read, 1/2 V + 1/2 V written

All results equal the references bit for bit, except the sums over tokens: each program's sum first, then the sum of
these (partials.py), always in the same order.

Legend: T tokens, D head width, E = D / 2, EP = E rounded up to a power of 2, P = T rounded up to a multiple of 16, C
columns of the buffer, NH heads of a tile, Q programs that share the tokens.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from overcoat.formats import FLOAT8, quantize_tensor
from overcoat.kernels.blockwise import (
    BLOCK,
    empty_rows,
    empty_rows_t,
    quad_magnitude,
    row_blocks,
    row_blocks_t,
    store_rows,
    store_scales,
    token_blocks,
)
from overcoat.kernels.device import (
    EXACT,
    as_words,
    atomic_amax,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    pack_rows,
    power_of_2,
    scale_of,
    to_float8,
)
from overcoat.kernels.heads import (
    buffer_columns,
    gradient_arguments,
    load_rotated_back,
    load_tables,
    rope_gradient,
    store_halves,
)
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, kernel
from overcoat.kernels.op import op
from overcoat.kernels.partials import sum_partials
from overcoat.kernels.quantize import empty_both, transpose_padded
from overcoat.kernels.tiles import store_quads

# First pass, without and with sums: elements of a tile, where each half of a head takes EP, its most heads, and
# programs in all, as many as an H200's 132 multiprocessors hold at once.
AMAX_TILES = {False: (2048, 2, 132 * 8), True: (4096, 4, 132 * 4)}
# Second pass: tokens of a tile, and heads that share cos and sin.
TILE_TOKENS, TILE_HEADS = 32, 8


@op
def qk_rope_backward_amax(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int, want_sums: bool
) -> Tuple[Tensor, Tensor]:
    """First pass: return max |gradient of q/k/v|, 0-d FP32; and its sums over tokens, (C,) FP32, the biases' gradients.

    Without `want_sums` the sums are empty. Other arguments as in `qk_rope_backward`.
    """
    gradient = rope_gradient(dq, dk, dv, cos, sin, num_q)
    return gradient.abs().amax(), gradient.sum(0) if want_sums else gradient.new_empty(0)


@qk_rope_backward_amax.fake
def _(dq, dk, dv, cos, sin, num_q, want_sums):
    sums = dq.new_empty(buffer_columns(dq, dk, dv) if want_sums else 0, dtype=torch.float32)
    return dq.new_empty((), dtype=torch.float32), sums


@qk_rope_backward_amax.cuda
def _(dq, dk, dv, cos, sin, num_q, want_sums):
    pointers, sizes = gradient_arguments(dq, dk, dv, cos, sin, num_q)
    (tokens, _, _, num_kv, width, *_), columns = sizes, buffer_columns(dq, dk, dv)
    half, (tile, most_heads, resident) = power_of_2(width // 2), AMAX_TILES[want_sums]
    rows = max(tile // (2 * half), 1)
    heads = min(power_of_2(num_q), most_heads, rows)
    groups = cdiv(num_q, heads) + 2 * cdiv(num_kv, heads)
    programs = min(cdiv(tokens, rows // heads), max(resident // groups, 1))
    top = dq.new_zeros((), dtype=torch.float32)
    partial = top.new_empty(programs if want_sums else 0, columns)
    _rope_amax_kernel[(programs, cdiv(num_q, heads), 3)](
        *pointers, top, partial if want_sums else top, *sizes, want_sums, half, rows // heads, heads,
        num_warps=4, **EXACT,
    )  # fmt: skip
    return top, sum_partials(partial)[0] if want_sums else partial.view(0)


@op
def qk_rope_backward_quantize(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, amax: Tensor, fmt: str, num_q: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """Second pass: return the gradient in FP8 in both layouts, (T, C) and (C, P), and its scale for `amax`."""
    data, scale = quantize_tensor(rope_gradient(dq, dk, dv, cos, sin, num_q), FLOAT8[fmt], amax)
    return data, transpose_padded(data), scale


@qk_rope_backward_quantize.fake
def _(dq, dk, dv, cos, sin, amax, fmt, num_q):
    return empty_both(dq, fmt, buffer_columns(dq, dk, dv))


@qk_rope_backward_quantize.cuda
def _(dq, dk, dv, cos, sin, amax, fmt, num_q):
    out, out_t, scale = empty_both(dq, fmt, buffer_columns(dq, dk, dv))
    pointers, sizes = gradient_arguments(dq, dk, dv, cos, sin, num_q)
    padded = out_t.shape[1]
    _rope_gradient_kernel[(cdiv(padded, TILE_TOKENS), cdiv(num_q, TILE_HEADS), 3)](
        *pointers, amax, out, out_t, scale, padded, *sizes, inverse_max(fmt),
        power_of_2(cos.shape[1] // 2), TILE_TOKENS, TILE_HEADS, num_warps=4, **EXACT,
    )  # fmt: skip
    return out, out_t, scale


@triton.jit
def _walk(
    dy_ptr, first, heads, stride_dy, ROTATE: tl.constexpr,
    cos_ptr, sin_ptr, amax_ptr, partial_ptr, T, positions, D: tl.constexpr, C, SUMS: tl.constexpr, EP: tl.constexpr,
    BT: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    """Run one program of `_rope_amax_kernel` on q, k or v; `first`: its first column of the fused buffer."""
    E = D // 2
    row, e, head0 = tl.arange(0, BT * NH), tl.arange(0, EP), tl.program_id(1) * NH
    t, head = row // NH, head0 + row % NH
    top = tl.zeros((BT * NH, EP), tl.float32)
    sum1, sum2 = tl.zeros((BT * NH, EP), tl.float32), tl.zeros((BT * NH, EP), tl.float32)
    for t0 in range(tl.program_id(0) * BT, T, tl.num_programs(0) * BT):
        inside = ((t < T - t0) & (head < heads))[:, None] & (e < E)[None, :]
        tables = load_tables(cos_ptr, sin_ptr, (t0 + t) % positions, e, inside, D, E)
        source = (t * stride_dy + head * D)[:, None] + e[None, :]
        d1, d2 = load_rotated_back(dy_ptr + tl.cast(t0, tl.int64) * stride_dy, source, E, inside, *tables, ROTATE)
        top = larger(top, larger(tl.abs(d1), tl.abs(d2)))
        if SUMS:
            sum1 += d1
            sum2 += d2
    atomic_amax(amax_ptr, max_magnitude(max_magnitude(top, 1), 0))
    if SUMS:
        own = head0 + tl.arange(0, NH)
        place = partial_ptr + tl.program_id(0) * C + first + own[:, None] * D + e[None, :]
        sum1, sum2 = tl.sum(tl.reshape(sum1, (BT, NH, EP)), 0), tl.sum(tl.reshape(sum2, (BT, NH, EP)), 0)
        store_halves(place, E, sum1, sum2, (own < heads)[:, None] & (e < E)[None, :])


@kernel
def _rope_amax_kernel(
    dq_ptr,  # (T, num_q * D), row stride `stride_q`: gradient of the rotated q
    dk_ptr,  # (T, num_kv * D), row stride `stride_k`: of the rotated k
    dv_ptr,  # (T, num_kv * D), row stride `stride_v`: of v
    cos_ptr,  # (positions, D)
    sin_ptr,  # (positions, D)
    amax_ptr,  # 0-d FP32, 0: max |gradient|
    partial_ptr,  # (Q, C) FP32: each program's sums over its tokens, if SUMS
    T, positions, num_q, num_kv, D: tl.constexpr, stride_q, stride_k, stride_v, SUMS: tl.constexpr, EP: tl.constexpr,
    BT: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    C = (num_q + 2 * num_kv) * D
    shared = (cos_ptr, sin_ptr, amax_ptr, partial_ptr, T, positions, D, C)
    if tl.program_id(2) == 0:
        _walk(dq_ptr, 0, num_q, stride_q, True, *shared, SUMS, EP, BT, NH)
    elif tl.program_id(1) * NH < num_kv:
        if tl.program_id(2) == 1:
            _walk(dk_ptr, num_q * D, num_kv, stride_k, True, *shared, SUMS, EP, BT, NH)
        else:
            _walk(dv_ptr, (num_q + num_kv) * D, num_kv, stride_v, False, *shared, SUMS, EP, BT, NH)


@triton.jit
def _scaled(d1, d2, inverse, inside):
    """Return halves times `inverse`, which may be NaN; zero outside, where the transposed layout is padded."""
    return tl.where(inside, d1 * inverse, 0.0), tl.where(inside, d2 * inverse, 0.0)


@triton.jit
def _tile(
    dy_ptr, first, heads, stride_dy, ROTATE: tl.constexpr,
    cos_ptr, sin_ptr, out_ptr, out_t_ptr, inverse, T, P, positions, D: tl.constexpr, stride_out, EP: tl.constexpr,
    BT: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    """Run one program of `_rope_gradient_kernel` on q, k or v; `first`: its first column of the fused buffer."""
    E = D // 2
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    t0, pair, e = tl.program_id(0) * BT, tl.arange(0, BT // 2), tl.arange(0, EP)
    t = 2 * pair
    even, odd = (t < T - t0)[:, None] & (e < E)[None, :], (t + 1 < T - t0)[:, None] & (e < E)[None, :]
    tables0 = load_tables(cos_ptr, sin_ptr, (t0 + t) % positions, e, even, D, E)
    tables1 = load_tables(cos_ptr, sin_ptr, (t0 + t + 1) % positions, e, odd, D, E)
    dy_ptr += t0.to(tl.int64) * stride_dy
    out_ptr += t0.to(tl.int64) * stride_out + first
    out_t_ptr = as_words(out_t_ptr, 16) + tl.cast(first, tl.int64) * (P // 2)
    for head in range(tl.program_id(1) * NH, tl.minimum(tl.program_id(1) * NH + NH, heads)):
        column = (head * D + e)[None, :]
        source = t[:, None] * stride_dy + column
        a1, a2 = load_rotated_back(dy_ptr, source, E, even, *tables0, ROTATE)
        b1, b2 = load_rotated_back(dy_ptr + stride_dy, source, E, odd, *tables1, ROTATE)
        a1, a2 = _scaled(a1, a2, inverse, even)
        b1, b2 = _scaled(b1, b2, inverse, odd)
        place = out_ptr + (t[:, None] * stride_out + column)
        store_halves(place, E, to_float8(a1, TYPE), to_float8(a2, TYPE), even)
        store_halves(place + stride_out, E, to_float8(b1, TYPE), to_float8(b2, TYPE), odd)
        inside_t = (e < E)[:, None] & (pair < (P - t0) // 2)[None, :]
        target = out_t_ptr + tl.cast(head * D, tl.int64) * (P // 2) + t0 // 2
        target += e[:, None] * (P // 2) + pair[None, :]
        store_halves(
            target, E * (P // 2), tl.trans(pack_rows(a1, b1, TYPE)), tl.trans(pack_rows(a2, b2, TYPE)), inside_t
        )


@kernel
def _rope_gradient_kernel(
    dq_ptr,  # (T, num_q * D), row stride `stride_q`: gradient of the rotated q
    dk_ptr,  # (T, num_kv * D), row stride `stride_k`: of the rotated k
    dv_ptr,  # (T, num_kv * D), row stride `stride_v`: of v
    cos_ptr,  # (positions, D)
    sin_ptr,  # (positions, D)
    amax_ptr,  # 0-d FP32: max |gradient|
    out_ptr,  # (T, C) FP8
    out_t_ptr,  # (C, P) FP8, of which two are stored together
    scale_ptr,  # 0-d FP32
    P,  # in this position: after the strides ptxas would use 166 registers at D = 128 instead of 128
    T, positions, num_q, num_kv, D: tl.constexpr, stride_q, stride_k, stride_v, INVERSE_MAX: tl.constexpr,
    EP: tl.constexpr, BT: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0)
    stride_out = (num_q + 2 * num_kv) * D
    shared = (cos_ptr, sin_ptr, out_ptr, out_t_ptr, inverse_of(scale), T, P, positions, D, stride_out)
    if tl.program_id(2) == 0:
        _tile(dq_ptr, 0, num_q, stride_q, True, *shared, EP, BT, NH)
    elif tl.program_id(1) * NH < num_kv:
        if tl.program_id(2) == 1:
            _tile(dk_ptr, num_q * D, num_kv, stride_k, True, *shared, EP, BT, NH)
        else:
            _tile(dv_ptr, (num_q + num_kv) * D, num_kv, stride_v, False, *shared, EP, BT, NH)


# ---- in blocks of 128 ------------------------------------------------------------------------------------------------


@op
def qk_rope_backward_blocks(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, fmt: str, num_q: int
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient in FP8 in both layouts with block scales, as `block_quantize_both` does."""
    gradient = rope_gradient(dq, dk, dv, cos, sin, num_q)
    return *row_blocks(gradient, FLOAT8[fmt]), *row_blocks_t(gradient, FLOAT8[fmt])


@qk_rope_backward_blocks.fake
def _empty_blocks(dq, dk, dv, cos, sin, fmt, num_q):
    shape, dtype = (dq.shape[0], buffer_columns(dq, dk, dv)), FLOAT8[fmt].dtype
    return *empty_rows(dq, shape, dtype), *empty_rows_t(dq, shape, dtype)


@triton.jit
def _load_rotated_row(
    dy_ptr, cos_ptr, sin_ptr, t, c, other, sign, rows, t0, positions, stride, rotates, D: tl.constexpr
):  # fmt: skip
    """Load rows t of a head's gradient (BT / 4, 1, D) in FP32, zero outside, and which are inside."""
    inside = (t < rows)[:, None, None] & (c >= 0)[None, :, :]
    source = dy_ptr + t[:, None, None] * stride
    x = tl.load(source + c[None, :, :], mask=inside, other=0.0).to(tl.float32)
    if rotates:
        place = ((t0 + t) % positions)[:, None, None] * D
        cos = tl.load(cos_ptr + (place + c[None, :, :]), mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + (place + other[None, :, :]), mask=inside, other=0.0).to(tl.float32)
        y = tl.load(source + other[None, :, :], mask=inside, other=0.0).to(tl.float32)
        x = x * cos + sign[None, :, :] * (y * sin)
    return x, inside


@kernel
def _rope_blocks_kernel(
    dq_ptr,  # (T, num_q * D), row stride `stride_q`: gradient of the rotated q
    dk_ptr,  # (T, num_kv * D), row stride `stride_k`: of the rotated k
    dv_ptr,  # (T, num_kv * D), row stride `stride_v`: of v
    cos_ptr,  # (positions, D)
    sin_ptr,  # (positions, D)
    out_ptr,  # (T, C) FP8
    scale_ptr,  # (C / 128, T) FP32
    out_t_ptr,  # (C, P) FP8, of which four are stored together
    scale_t_ptr,  # (ceil(T / 128), C) FP32
    P, T, positions, num_q, num_kv, stride_q, stride_k, stride_v, INVERSE_MAX: tl.constexpr, PADDED: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    head, block, C = tl.program_id(0), tl.program_id(1), (num_q + 2 * num_kv) * D
    t0, quad = block * BT, tl.arange(0, BT // 4)
    dy_ptr, stride, own = dq_ptr, stride_q, head
    if head >= num_q:
        dy_ptr, stride, own = dk_ptr, stride_k, head - num_q
    if head >= num_q + num_kv:
        dy_ptr, stride, own = dv_ptr, stride_v, head - num_q - num_kv
    c, t, rows = tl.arange(0, D)[None, :], 4 * quad, T - t0
    half = c // (D // 2)
    turned = (c + (D // 2 - D * half), 1.0 - 2.0 * half.to(tl.float32), rows, t0, positions, stride)
    dy_ptr += t0.to(tl.int64) * stride + own * D
    rotates = head < num_q + num_kv
    x0, in0 = _load_rotated_row(dy_ptr, cos_ptr, sin_ptr, t, c, *turned, rotates, D)
    x1, in1 = _load_rotated_row(dy_ptr, cos_ptr, sin_ptr, t + 1, c, *turned, rotates, D)
    x2, in2 = _load_rotated_row(dy_ptr, cos_ptr, sin_ptr, t + 2, c, *turned, rotates, D)
    x3, in3 = _load_rotated_row(dy_ptr, cos_ptr, sin_ptr, t + 3, c, *turned, rotates, D)
    out_ptr += t0.to(tl.int64) * C + head * D
    scale_ptr += head.to(tl.int64) * T + t0
    offsets = t[:, None, None] * C + c[None, :, :]
    store_rows(x0, t, rows, out_ptr, scale_ptr, offsets, in0, INVERSE_MAX)
    store_rows(x1, t + 1, rows, out_ptr + C, scale_ptr, offsets, in1, INVERSE_MAX)
    store_rows(x2, t + 2, rows, out_ptr + 2 * C, scale_ptr, offsets, in2, INVERSE_MAX)
    store_rows(x3, t + 3, rows, out_ptr + 3 * C, scale_ptr, offsets, in3, INVERSE_MAX)
    real = c >= 0
    scale_t_ptr += block.to(tl.int64) * C + head * D
    inverse = store_scales(max_magnitude(quad_magnitude(x0, x1, x2, x3), 0), scale_t_ptr, c, real, INVERSE_MAX)
    out_t_ptr = as_words(out_t_ptr, 32) + (head * D).to(tl.int64) * (P // 4) + t0 // 4
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    store_quads(
        (x0, x1, x2, x3), (in0, in1, in2, in3), inverse, out_t_ptr, c, quad, real, (P - t0) // 4, P // 4, PADDED, TYPE
    )


@qk_rope_backward_blocks.cuda
def _(dq, dk, dv, cos, sin, fmt, num_q):
    if cos.shape[1] != BLOCK:  # a block is a head
        return qk_rope_backward_blocks.reference(dq, dk, dv, cos, sin, fmt, num_q)
    results = _, _, out_t, _ = _empty_blocks(dq, dk, dv, cos, sin, fmt, num_q)
    pointers, (tokens, positions, _, num_kv, _, *strides) = gradient_arguments(dq, dk, dv, cos, sin, num_q)
    padded = out_t.shape[1]
    _rope_blocks_kernel[(num_q + 2 * num_kv, token_blocks(padded))](
        *pointers, *results, padded, tokens, positions, num_q, num_kv, *strides, inverse_max(fmt), padded > tokens,
        BLOCK, BLOCK, num_warps=4, **EXACT,
    )  # fmt: skip
    return results
