"""Rotary position embedding on the fused q/k/v buffer, with the optional per-head norm of q and k (Qwen3).

The buffer's columns are [q heads | k heads | v heads], each head D wide. With (x1, x2) the two halves of a head,

    rotate((x1, x2)) = (x1 * cos1 - x2 * sin1,  x2 * cos2 + x1 * sin2)

If the model normalizes q and k, each head first goes through RMSNorm: x <- x * rstd * weight. v does not change. The
backward rotates the gradient back, then applies the head norms' backward.

The op is cheap to recompute, so attention saves its *input*, q and k in 12 bits (formats/bf12.py), v in 8, one group
per token and head, and recomputes the rotated q and k in the backward. rope_quantize.py writes the gradient directly in
FP8, without head norms. Bytes moved, with V = T * (num_q + 2 num_kv) * D * 2, the fused buffer (3 U for multi-head
attention):

    qk_rope             1 V read, 1 V written
    qk_rope_encode12_   1 V read, 2/3 V written in place, 2/3 V of codes written
    qk_rope_decode12    2/3 V read, 1 V written
    qk_rope_backward    1 V read, 1 V written; with head norms 2/3 V more read

All results equal the references bit for bit, except with head norms: their means are summed in another order, so the
gradient may differ by one BF16 step. Weight gradients are deterministic: each program sums its own heads, partials.py
adds the programs' sums in a fixed order.

Forward tiles: a program takes one tile, NH heads of q, k or v of one token, so that the next program's loads do not
wait for its stores, and no masks are needed. NH is a power of 2 that divides the heads of q as well as of k and v; if
that is small (one key head), a tile has BT tokens. A token's tiles are consecutive, so all but the first find its cos
and sin in a cache. Backward tiles: each program takes every Q-th tile of tokens with all of its heads, so that the work
is balanced with grouped queries.

Legend: T tokens = batch * sequence, D head width, E = D / 2, EP = E rounded up to a power of 2, P positions in cos and
sin (P = T, or the sequence length when all batch rows share them: token t uses row t mod P), Q programs. A tile with
head norms has R rows, a row is one head of one token: NH heads of BT = R / NH tokens.
"""

from __future__ import annotations

import math
from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from overcoat.kernels import quantize
from overcoat.kernels.codes import CODES
from overcoat.kernels.device import EXACT, max_magnitude, power_of_2
from overcoat.kernels.heads import (
    buffer_columns,
    decode_heads,
    empty_heads,
    encode_heads,
    gradient_arguments,
    head_magnitude,
    load_codes,
    load_halves,
    load_rotated_back,
    load_tables,
    per_token,
    rotate,
    rotate_back,
    split_heads,
    store_codes,
    store_halves,
)
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense, kernel
from overcoat.kernels.op import op
from overcoat.kernels.partials import sum_partials
from overcoat.kernels.tiles import load_inside, raise_amax

# A row of o is a weighted mean of rows of v, so max |o| <= max |v|. The margin covers rounding in fused kernels: of the
# weights to 16 bits (2^-9), and of o to BF16.
MARGIN = 1.0 + 2.0**-7
_MARGIN = tl.constexpr(MARGIN)
# The most elements of a tile, where each half of a head takes EP, and elements per thread.
HEAD_TILE, HEAD_ELEMENTS = 2048, 16
# Registers of a thread that encodes BF16: with 48 ten words spill; with more than 56 one program fewer fits.
ENCODE_REGISTERS = 56


def _normalize_heads(x: Tensor, weight: Optional[Tensor], eps: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


@op
def qk_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Optional[Tensor], k_weight: Optional[Tensor], eps: float,
    num_q: int, num_kv: int,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """Return qkv (T, (num_q + 2 num_kv) * D) with q and k normalised and rotated; and an upper bound of max |o|.

    cos, sin: (P, D). q_weight, k_weight: (D,), of each head's RMSNorm with `eps`, or None. The bound, of attention's
    result o, is 0-d FP32.
    """
    q, k, v = split_heads(qkv, num_q, num_kv)
    c, s = per_token(cos, qkv.shape[0]), per_token(sin, qkv.shape[0])
    q = rotate(_normalize_heads(q, q_weight, eps), c, s)
    k = rotate(_normalize_heads(k, k_weight, eps), c, s)
    return torch.cat((q, k, v), 1).flatten(1).to(qkv.dtype), quantize.amax.reference(v) * MARGIN


@qk_rope.fake
def _(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv):
    return qkv.new_empty(*qkv.shape), qkv.new_empty((), dtype=torch.float32)


@op(mutates=("qkv",))
def qk_rope_encode12_(
    qkv: Tensor, center: Optional[Tensor], cos: Tensor, sin: Tensor, q_weight: Optional[Tensor],
    k_weight: Optional[Tensor], eps: float, num_q: int, num_kv: int, code: str,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Apply `qk_rope` to qkv in place; return its previous content, encoded.

    q and k as bf12; v - center, center (num_kv * D,), in the 8-bit `code`, or v where that is smaller (heads.py).

    Returns:
        codes int8 (T, (num_q + 2 num_kv) * D), the upper bits of q and k, then v's bytes; lower bits of q and k, uint8
        (T, (num_q + num_kv) * D/2); BF16 maxima (T, num_q + 2 num_kv); `qk_rope`'s bound.
    """
    kept = encode_heads(qkv, center, num_q, num_kv, code)
    rotated, bound = qk_rope.reference(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv)
    qkv.copy_(rotated)
    return *kept, bound


@qk_rope_encode12_.fake
def _(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code):
    return *empty_heads(qkv, num_q, num_kv, code), qkv.new_empty((), dtype=torch.float32)


@op
def qk_rope_decode12(
    codes: Tensor, lower: Tensor, group_amax: Tensor, center: Optional[Tensor], cos: Optional[Tensor],
    sin: Optional[Tensor], num_q: int, num_kv: int, code: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Decode q/k/v from `qk_rope_encode12_` to `dtype` and, if cos and sin are given, rotate q and k again.

    There are no head norms here: decode without rotation, then call `qk_rope`.
    """
    values = decode_heads(codes, lower, group_amax, center, num_q, num_kv, code)
    if cos is not None and sin is not None:
        values, _ = qk_rope.reference(values, cos, sin, None, None, 0.0, num_q, num_kv)
    return values.to(dtype)


@qk_rope_decode12.fake
def _(codes, lower, group_amax, center, cos, sin, num_q, num_kv, code, dtype):
    return codes.new_empty(*codes.shape, dtype=dtype)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _head_norm(x1, x2, w1, w2, D: tl.constexpr, eps):
    """Return the RMSNorm of each head, given as two halves (NH, EP)."""
    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) * (1.0 / D) + eps)[:, None]
    return x1 * rstd * w1, x2 * rstd * w2


@triton.jit
def _take_heads(
    source_ptr, amax_ptr, center_ptr, codes_ptr, lower_ptr, offsets, centers, known, inside, E: tl.constexpr,
    HAS_CENTER: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr, CODE: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Load the halves (BT * NH, EP) of heads in FP32, from codes if DECODE; store their codes if ENCODE.

    known: which heads exist. FINE: heads of q and k, in bf12; else of v.
    """
    if HAS_CENTER and not FINE:
        center1, center2 = load_halves(center_ptr + centers, E, inside)
    if DECODE:
        x1, x2 = load_codes(source_ptr + offsets, lower_ptr, amax_ptr, known, inside, E, CODE, FINE)
        if HAS_CENTER and not FINE:
            stays = (load_inside(amax_ptr, known).to(tl.float32) < 0.0)[:, None]
            x1, x2 = x1 + tl.where(stays, 0.0, center1), x2 + tl.where(stays, 0.0, center2)
    else:
        x1, x2 = load_halves(source_ptr + offsets, E, inside)
    if ENCODE:
        c1, c2, stays = x1, x2, None
        if HAS_CENTER and not FINE:
            c1, c2 = x1 - center1, x2 - center2
            stays = head_magnitude(x1, x2) < head_magnitude(c1, c2)
            c1, c2 = tl.where(stays[:, None], x1, c1), tl.where(stays[:, None], x2, c2)
        store_codes(codes_ptr + offsets, lower_ptr, amax_ptr, c1, c2, stays, known, inside, E, CODE, FINE)
    return x1, x2


@kernel
def _rope_kernel(
    source_ptr,  # (T, heads * D): values, or int8 codes if DECODE
    amax_ptr,  # (T, heads) BF16: written if ENCODE, read if DECODE
    codes_ptr,  # (T, heads * D) int8, written if ENCODE
    lower_ptr,  # (T, (num_q + num_kv) * E) uint8: lower bits of q and k; written if ENCODE, read if DECODE
    out_ptr,  # (T, heads * D); source_ptr if IN_PLACE
    center_ptr,  # (num_kv * D,) FP32: taken out of v before its codes, added after, if HAS_CENTER
    bound_ptr,  # 0-d FP32, 0: MARGIN * max |v|, unless DECODE
    cos_ptr,  # (P, D)
    sin_ptr,  # (P, D)
    q_weight_ptr,  # (D,), if HEAD_NORM
    k_weight_ptr,  # (D,), if HEAD_NORM
    eps, T, P, num_q: tl.constexpr, num_kv: tl.constexpr, D: tl.constexpr, IN_PLACE: tl.constexpr,
    HAS_CENTER: tl.constexpr, HEAD_NORM: tl.constexpr, ROTATE: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr,
    CODE: tl.constexpr, EP: tl.constexpr, NH: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    heads: tl.constexpr = num_q + 2 * num_kv
    E: tl.constexpr = D // 2
    tile, token = tl.program_id(0) % (heads // NH), tl.program_id(0) // (heads // NH) * BT
    row = token.to(tl.int64) * heads
    amax_ptr += row
    source_ptr += row * D
    codes_ptr += row * D
    lower_ptr += token.to(tl.int64) * ((num_q + num_kv) * E)
    out_ptr += row * D
    r, e = tl.arange(0, BT * NH), tl.arange(0, EP)
    # cos, sin and weights are loaded for each head: vectors (EP,) would be broadcast through shared memory.
    first = tl.zeros((BT * NH, 1), tl.int32) + e[None, :]
    inside = None if E == EP else first < E
    if BT == 1:
        head, lane, known = tile * NH + r, tile * NH + r, None
        lower_ptr += head[:, None] * E + e[None, :]
        cos_ptr += (token % P).to(tl.int64) * D
        sin_ptr += (token % P).to(tl.int64) * D
        place = first
    else:
        step, lane = r // NH, tile * NH + r % NH
        head, known = step * heads + lane, step < T - token
        lower_ptr += (step * (num_q + num_kv) + lane)[:, None] * E + e[None, :]
        place = ((token + step) % P)[:, None] * D + first
        inside = known[:, None] & (first < E)
    offsets, centers = head[:, None] * D + e[None, :], (lane - (num_q + num_kv))[:, None] * D + e[None, :]
    places = (source_ptr, amax_ptr + head, center_ptr, codes_ptr, lower_ptr, offsets, centers)
    if tile < (num_q + num_kv) // NH:
        if ROTATE:
            cos1, cos2 = load_halves(cos_ptr + place, E, inside)
            sin1, sin2 = load_halves(sin_ptr + place, E, inside)
        y1, y2 = _take_heads(*places, known, inside, E, HAS_CENTER, ENCODE, DECODE, CODE, True)
        if HEAD_NORM:
            weight_ptr = q_weight_ptr
            if tile >= num_q // NH:
                weight_ptr = k_weight_ptr
            y1, y2 = _head_norm(y1, y2, *load_halves(weight_ptr + first, E, inside), D, eps)
        if ROTATE:
            y1, y2 = y1 * cos1 - y2 * sin1, y2 * cos2 + y1 * sin2
        store_halves(out_ptr + offsets, E, y1, y2, inside)
    else:
        if not DECODE:
            seen = tl.load(bound_ptr, cache_modifier=".cg")
        x1, x2 = _take_heads(*places, known, inside, E, HAS_CENTER, ENCODE, DECODE, CODE, False)
        if not DECODE:
            raise_amax(bound_ptr, seen, max_magnitude(head_magnitude(x1, x2), 0) * _MARGIN)
        if not IN_PLACE:
            store_halves(out_ptr + offsets, E, x1, x2, inside)


def _launch_rope(
    source: Tensor, out: Tensor, kept: Sequence[Tensor], center: Optional[Tensor], code: str,
    tables: tuple[Optional[Tensor], ...], eps: float, num_q: int, num_kv: int,
) -> Tensor:  # fmt: skip
    """Launch `_rope_kernel`; return the bound of max |o|, meaningful if source holds values.

    source: values, also encoded into kept (codes, lower, amax) if given; or int8 codes, decoded with kept.
    tables: cos and sin or None; q's and k's norm weights or None.
    """
    center, cos, sin, q_weight, k_weight = dense(center, *tables)
    decodes = source.dtype == torch.int8
    encodes = bool(kept) and not decodes
    codes, lower, amax = kept or (source, source, source)
    bound = source if decodes else source.new_zeros((), dtype=torch.float32)
    tokens, heads = source.shape[0], num_q + 2 * num_kv
    width = source.shape[1] // heads
    half, common = power_of_2(width // 2), math.gcd(num_q, num_kv)
    count = min(common & -common, max(HEAD_TILE // (2 * half), 1))
    elements = 2 * half * count
    steps = 1 if 2 * elements >= HEAD_TILE else HEAD_TILE // elements
    if q_weight is not None and k_weight is not None and q_weight.dtype != k_weight.dtype:
        q_weight, k_weight = q_weight.float(), k_weight.float()
    pointers = [source if x is None else x for x in (cos, sin, q_weight, k_weight)]
    _rope_kernel[(cdiv(tokens, steps) * (heads // count),)](
        source, amax, codes, lower, out, source if center is None else center, bound, *pointers,
        eps, tokens, pointers[0].shape[0], num_q, num_kv, width, out is source, center is not None,
        q_weight is not None, cos is not None, encodes, decodes, CODES[code], half, count, steps,
        num_warps=max(steps * elements // (32 * HEAD_ELEMENTS), 1),
        maxnreg=ENCODE_REGISTERS if encodes and source.dtype == torch.bfloat16 and steps == 1 else None,
        **EXACT,
    )  # fmt: skip
    return bound


@qk_rope.cuda
def _(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv):
    if (q_weight is None) != (k_weight is None):
        return qk_rope.reference(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv)
    qkv = qkv.contiguous()
    out = torch.empty_like(qkv)
    return out, _launch_rope(qkv, out, (), None, "sqrt8", (cos, sin, q_weight, k_weight), eps, num_q, num_kv)


@qk_rope_encode12_.cuda
def _(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code):
    if (q_weight is None) != (k_weight is None):
        return qk_rope_encode12_.reference(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code)
    rotated, kept = qkv.contiguous(), empty_heads(qkv, num_q, num_kv, code)
    bound = _launch_rope(rotated, rotated, kept, center, code, (cos, sin, q_weight, k_weight), eps, num_q, num_kv)
    if rotated is not qkv:
        qkv.copy_(rotated)
    return *kept, bound


@qk_rope_decode12.cuda
def _(codes, lower, group_amax, center, cos, sin, num_q, num_kv, code, dtype):
    kept = dense(codes, lower, group_amax)
    out = codes.new_empty(*codes.shape, dtype=dtype)
    _launch_rope(kept[0], out, kept, center, code, (cos, sin, None, None), 0.0, num_q, num_kv)
    return out


# Elements of a tile, where each half of a head takes EP, and the most heads of one token in it: few, so that 28 or 8
# heads leave no rows empty, but enough to read 1 KiB at once at D = 128.
TILE = 2048
MAX_HEADS = 4
# As many programs of 4 warps as an H200's 132 multiprocessors hold at once with so many registers per thread.
REGISTERS = 128
RESIDENT = 132 * 65536 // (REGISTERS * 128)


def _head_norm_backward(dy: Tensor, x: Tensor, weight: Optional[Tensor], eps: float) -> Tuple[Tensor, Tensor]:
    if weight is None:
        return dy, dy.new_zeros(0)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    xhat, g = x * rstd, dy * weight.float()
    return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True)), (dy * xhat).sum((0, 1))


@op
def qk_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Optional[Tensor], cos: Tensor, sin: Tensor, q_weight: Optional[Tensor],
    k_weight: Optional[Tensor], eps: float, num_q: int,
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of qkv (T, (num_q + 2 num_kv) * D) and of the head norms' weights, (D,) FP32 or empty.

    Args:
        dq: (T, num_q * D); dk, dv: (T, num_kv * D): gradients of the rotated q and k, and of v.
        qkv: `qk_rope`'s input, needed only with head norms.
    """
    width, num_kv = dq.shape[1] // num_q, dk.shape[1] // (dq.shape[1] // num_q)
    gq, gk, gv = (part.contiguous().unflatten(1, (-1, width)).float() for part in (dq, dk, dv))
    q, k, _ = (gq, gk, gv) if qkv is None else split_heads(qkv, num_q, num_kv)
    gq, dq_weight = _head_norm_backward(rotate_back(gq, cos, sin), q, q_weight, eps)
    gk, dk_weight = _head_norm_backward(rotate_back(gk, cos, sin), k, k_weight, eps)
    return torch.cat((gq, gk, gv), 1).flatten(1).to(dq.dtype), dq_weight, dk_weight


@qk_rope_backward.fake
def _(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps, num_q):
    empty = dq.new_empty(0, dtype=torch.float32)
    dq_weight = empty if q_weight is None else torch.empty_like(q_weight, dtype=torch.float32)
    dk_weight = torch.empty_like(empty) if k_weight is None else torch.empty_like(k_weight, dtype=torch.float32)
    return dq.new_empty(dq.shape[0], buffer_columns(dq, dk, dv)), dq_weight, dk_weight


@triton.jit
def _norm_backward(d1, d2, x1, x2, w1, w2, known, D, eps):
    """Return the gradients of input and weight of each row's RMSNorm, as halves (R, EP); 0 where not `known` (R,)."""
    share = 1.0 / D
    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) * share + eps)
    rstd = tl.where(known, rstd, 0.0)[:, None]  # eps may be 0, rstd of a row of zeros infinite
    x1, x2 = x1 * rstd, x2 * rstd
    g1, g2 = d1 * w1, d2 * w2
    mean = (tl.sum(g1 * x1 + g2 * x2, 1) * share)[:, None]
    return rstd * (g1 - x1 * mean), rstd * (g2 - x2 * mean), d1 * x1, d2 * x2


@triton.jit
def _part_backward(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, partial_ptr, heads, stride_dy, ROTATE: tl.constexpr, NORM: tl.constexpr,
    cos_ptr, sin_ptr, T, positions, D: tl.constexpr, width, eps,
    EP: tl.constexpr, BT: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    """Compute one program's share of q, k or v; x and dx are columns of the fused buffer, `width` wide."""
    E = D // 2
    row, e = tl.arange(0, BT * NH), tl.arange(0, EP)
    t, lane = row // NH, row % NH
    real = e < E
    if NORM:
        w1, w2 = load_halves(weight_ptr + e, E, real)
        w1, w2 = w1[None, :], w2[None, :]
        dw1, dw2 = tl.zeros((BT * NH, EP), tl.float32), tl.zeros((BT * NH, EP), tl.float32)
    for t0 in range(tl.program_id(0) * BT, T, tl.num_programs(0) * BT):
        start = tl.cast(t0, tl.int64)
        in_time = t < T - t0
        inside = in_time[:, None] & real[None, :]
        tables = load_tables(cos_ptr, sin_ptr, (t0 + t) % positions, e, inside, D, E)
        for head0 in range(0, heads, NH):
            known = in_time & (head0 + lane < heads)
            inside = known[:, None] & real[None, :]
            column = (head0 + lane) * D
            source = (t * stride_dy + column)[:, None] + e[None, :]
            place = (t * width + column)[:, None] + e[None, :]
            d1, d2 = load_rotated_back(dy_ptr + start * stride_dy, source, E, inside, *tables, ROTATE)
            if NORM:
                x1, x2 = load_halves(x_ptr + start * width + place, E, inside)
                d1, d2, product1, product2 = _norm_backward(d1, d2, x1, x2, w1, w2, known, D, eps)
                dw1 += product1
                dw2 += product2
            store_halves(dx_ptr + start * width + place, E, d1, d2, inside)
    if NORM:
        store_halves(partial_ptr + tl.program_id(0) * D + e, E, tl.sum(dw1, 0), tl.sum(dw2, 0), real)


@kernel
def _rope_backward_kernel(
    dq_ptr,  # (T, num_q * D), row stride `stride_q`: gradient of the rotated q
    dk_ptr,  # (T, num_kv * D), row stride `stride_k`: of the rotated k
    dv_ptr,  # (T, num_kv * D), row stride `stride_v`: of v
    cos_ptr,  # (positions, D)
    sin_ptr,  # (positions, D)
    qkv_ptr,  # (T, (num_q + 2 num_kv) * D): before norm and rotation; v is not read
    q_weight_ptr,  # (D,), if Q_NORM
    k_weight_ptr,  # (D,), if K_NORM
    out_ptr,  # (T, (num_q + 2 num_kv) * D)
    q_partial_ptr,  # (Q, D) FP32: each program's sums, if Q_NORM
    k_partial_ptr,  # (Q, D) FP32, if K_NORM
    T, positions, num_q, num_kv, D: tl.constexpr, stride_q, stride_k, stride_v, eps, Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr, EP: tl.constexpr, R: tl.constexpr,
    NHQ: tl.constexpr,  # NH of q
    NHK: tl.constexpr,  # NH of k and v
):  # fmt: skip
    k, v = num_q * D, (num_q + num_kv) * D
    shared = (cos_ptr, sin_ptr, T, positions, D, (num_q + 2 * num_kv) * D, eps)
    _part_backward(
        dq_ptr, qkv_ptr, q_weight_ptr, out_ptr, q_partial_ptr, num_q, stride_q, True, Q_NORM,
        *shared, EP, R // NHQ, NHQ,
    )  # fmt: skip
    _part_backward(
        dk_ptr, qkv_ptr + k, k_weight_ptr, out_ptr + k, k_partial_ptr, num_kv, stride_k, True, K_NORM,
        *shared, EP, R // NHK, NHK,
    )  # fmt: skip
    _part_backward(
        dv_ptr, qkv_ptr + v, k_weight_ptr, out_ptr + v, k_partial_ptr, num_kv, stride_v, False, False,
        *shared, EP, R // NHK, NHK,
    )  # fmt: skip


@qk_rope_backward.cuda
def _(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps, num_q):
    pointers, sizes = gradient_arguments(dq, dk, dv, cos, sin, num_q)
    tokens, width = dq.shape[0], cos.shape[1]
    num_kv, half = dk.shape[1] // width, power_of_2(width // 2)
    rows = max(TILE // (2 * half), 1)
    heads_q, heads_kv = (min(power_of_2(heads), MAX_HEADS, rows) for heads in (num_q, num_kv))
    programs = min(cdiv(tokens, rows // max(heads_q, heads_kv)), RESIDENT)
    out = dq.new_empty(tokens, buffer_columns(dq, dk, dv))
    partials = [
        dq.new_empty(0 if weight is None else programs, width, dtype=torch.float32) for weight in (q_weight, k_weight)
    ]
    _rope_backward_kernel[(programs,)](
        *pointers, *[pointers[3] if x is None else x.contiguous() for x in (qkv, q_weight, k_weight)], out, *partials,
        *sizes, eps, q_weight is not None, k_weight is not None, half, rows, heads_q, heads_kv,
        num_warps=4, maxnreg=REGISTERS, **EXACT,
    )  # fmt: skip
    pairs = tuple(zip(partials, (q_weight, k_weight), strict=True))
    found = [partial for partial, weight in pairs if weight is not None]
    sums = iter(sum_partials(*found) if found else ())
    dq_weight, dk_weight = (partial.view(0) if weight is None else next(sums) for partial, weight in pairs)
    return out, dq_weight, dk_weight
