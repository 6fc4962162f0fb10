"""Rotary position embedding on the fused q/k/v buffer, with the optional per-head norm of q and k (Qwen3).

The buffer's columns are [q heads | k heads | v heads], each head D wide. With (x1, x2) the two halves of a head,

    rotate((x1, x2)) = (x1 * cos1 - x2 * sin1,  x2 * cos2 + x1 * sin2)

and, where the model normalises q and k, each head passes RMSNorm first: x <- x * rstd * weight. v passes unchanged.

The op is cheap to run again, so attention keeps its *input*, q and k in 12 bits (formats/bf12.py), v in 8, one group
per token and head, and rebuilds the rotated q and k in the backward. Bytes moved, with V = T * (num_q + 2 num_kv) * D
* 2, the fused buffer (3 U for multi-head attention):

    qk_rope             1 V read, 1 V written
    qk_rope_encode12_   1 V read, 2/3 V written in place, 2/3 V of codes written
    qk_rope_decode12    2/3 V read, 1 V written

Everything equals the reference bit for bit, except with head norms: their mean is summed in another order.

A program takes one tile, NH heads of q, k or v of one token, and ends: so the next one's loads do not wait for its
stores, and there is nothing to mask. NH is a power of 2 that divides the heads of q as well as of k and v; where that
leaves little (one key head), a tile is of BT tokens. Tiles of a token follow each other, so all but the first find its
cos and sin in a cache.

Legend: T tokens = batch * sequence, D head width, E = D / 2, EP = E rounded up to a power of 2, P positions in cos and
sin (P = T, or the sequence length when all batch rows share them: token t uses row t mod P).
"""

from __future__ import annotations

import math
from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from overcoat.formats import Quantized, decode_groups, encode_groups, group_code
from overcoat.formats.bf12 import decode_bf12, encode_bf12
from overcoat.kernels import quantize
from overcoat.kernels.codes import CODES, E4M3_CODE, decode, encode, load_bf12, pack_bf12
from overcoat.kernels.device import EXACT, larger, max_magnitude, power_of_2
from overcoat.kernels.instructions import to_float32
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense, kernel
from overcoat.kernels.op import op
from overcoat.kernels.tiles import load_inside, raise_amax

# A row of o is a mean of rows of v, so max |o| <= max |v|: this much more, as fused kernels round the mean's weights to
# 16 bits, by 2^-9, and then o, to the next BF16 number at most.
MARGIN = 1.0 + 2.0**-7
_MARGIN = tl.constexpr(MARGIN)
# The most elements of a tile, each half of a head in EP of them, and how many a thread has.
HEAD_TILE, HEAD_ELEMENTS = 2048, 16
# Registers of a thread that encodes BF16: with 48 ten words spill, with more one program less finds room.
ENCODE_REGISTERS = 56


def split_heads(qkv: Tensor, num_q: int, num_kv: int) -> Tuple[Tensor, Tensor, Tensor]:
    """The fused buffer's q, k and v (T, heads, D) in FP32."""
    count = num_q + 2 * num_kv
    heads = qkv.contiguous().view(qkv.shape[0], count, qkv.shape[1] // count).float()
    q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
    return q, k, v


def per_token(table: Tensor, tokens: int) -> Tensor:
    """cos or sin (P, D) as (T, 1, D) FP32."""
    return table.float().repeat(tokens // table.shape[0], 1).unsqueeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


def _normalize_heads(x: Tensor, weight: Optional[Tensor], eps: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


@op
def qk_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    eps: float,
    num_q: int,
    num_kv: int,
) -> Tensor:
    """Normalise (if weights are given) and rotate q and k.

    Args:
        qkv: (T, (num_q + 2 num_kv) * D).
        cos, sin: (P, D).
        q_weight, k_weight: (D,) or None; eps: of their RMSNorm.

    Returns:
        the same shape and dtype as qkv.
    """
    q, k, v = split_heads(qkv, num_q, num_kv)
    c, s = per_token(cos, qkv.shape[0]), per_token(sin, qkv.shape[0])
    q = _rotate(_normalize_heads(q, q_weight, eps), c, s)
    k = _rotate(_normalize_heads(k, k_weight, eps), c, s)
    return torch.cat((q, k, v), 1).flatten(1).to(qkv.dtype)


@qk_rope.fake
def _(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv):
    return qkv.new_empty(qkv.shape)


@op(mutates=("qkv",))
def qk_rope_encode12_(
    qkv: Tensor,
    center: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    eps: float,
    num_q: int,
    num_kv: int,
    code: str,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """`qk_rope` in place; returns what was there before: q and k as bf12, v - center (num_kv * D,) in the 8-bit `code`.

    Returns:
        codes int8 (T, (num_q + 2 num_kv) * D), the upper bits of q and k, then v's bytes; lower bits of q and k, uint8
        (T, (num_q + num_kv) * D/2); BF16 maxima (T, num_q + 2 num_kv); 0-d FP32, what |o| of attention does not exceed.
    """
    heads = num_q + num_kv
    qk, v = qkv.contiguous().float().unflatten(1, (heads + num_kv, -1)).split((heads, num_kv), 1)
    upper, lower, qk_amax = encode_bf12(qk)
    bound = quantize.amax.reference(v) * MARGIN
    v, v_amax = encode_groups(v if center is None else v - center.view(num_kv, -1), code, v.shape[2])
    codes = torch.cat((upper, v.view(torch.int8)), 1).flatten(1)
    qkv.copy_(qk_rope.reference(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv))
    return codes, lower.flatten(1), torch.cat((qk_amax, v_amax.view(-1, num_kv)), 1), bound


def _empty_kept(qkv: Tensor, num_q: int, num_kv: int) -> tuple[Tensor, ...]:
    """What `qk_rope_encode12_` returns, uninitialised; the bound is 0, as int32."""
    (tokens, columns), heads = qkv.shape, num_q + 2 * num_kv
    lower = qkv.new_empty((tokens, (num_q + num_kv) * (columns // heads // 2)), dtype=torch.uint8)
    amax = qkv.new_empty((tokens, heads), dtype=torch.bfloat16)
    return qkv.new_empty(qkv.shape, dtype=torch.int8), lower, amax, qkv.new_zeros((), dtype=torch.int32)


@qk_rope_encode12_.fake
def _(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code):
    *kept, bound = _empty_kept(qkv, num_q, num_kv)
    return *kept, bound.float()


@op
def qk_rope_decode12(
    codes: Tensor,
    lower: Tensor,
    group_amax: Tensor,
    center: Optional[Tensor],
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    num_q: int,
    num_kv: int,
    code: str,
    dtype: torch.dtype,
) -> Tensor:
    """Decode q/k/v from `qk_rope_encode12_` and, if cos and sin are given, rotate q and k again; in `dtype`.

    Without head norms: `qk_rope` applies those to what was decoded without a rotation.
    """
    heads, tokens = num_q + num_kv, codes.shape[0]
    qk, v = codes.unflatten(1, (heads + num_kv, -1)).split((heads, num_kv), 1)
    qk = decode_bf12(qk, lower.view(tokens, heads, -1), group_amax[:, :heads])
    v = v.contiguous().view(group_code(code).dtype)
    v = decode_groups(Quantized(v, group_amax[:, heads:].reshape(-1, 1)), code, v.shape[2])
    values = torch.cat((qk, v if center is None else v + center.view(num_kv, -1)), 1).flatten(1)
    if cos is not None and sin is not None:
        values = qk_rope.reference(values, cos, sin, None, None, 0.0, num_q, num_kv)
    return values.to(dtype)


@qk_rope_decode12.fake
def _(codes, lower, group_amax, center, cos, sin, num_q, num_kv, code, dtype):
    return codes.new_empty(codes.shape, dtype=dtype)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_halves(pointer, E, inside):
    """The two halves of rows of a table or of heads, in FP32; `pointer` to elements of the first, E apart."""
    return to_float32(load_inside(pointer, inside)), to_float32(load_inside(pointer + E, inside))


@triton.jit
def load_tables(cos_ptr, sin_ptr, position, e, inside, D, E):
    """The halves of cos and sin (rows, EP) at the rows' positions, in FP32."""
    place = position[:, None] * D + e[None, :]
    cos1, cos2 = load_halves(cos_ptr + place, E, inside)
    sin1, sin2 = load_halves(sin_ptr + place, E, inside)
    return cos1, cos2, sin1, sin2


@triton.jit
def _head_norm(x1, x2, w1, w2, D: tl.constexpr, eps):
    """RMSNorm of each head (NH, EP) + (NH, EP)."""
    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) * (1.0 / D) + eps)[:, None]
    return x1 * rstd * w1, x2 * rstd * w2


@triton.jit
def _store_halves(pointer, E, first, second, inside):
    tl.store(pointer, first.to(pointer.dtype.element_ty), mask=inside)
    tl.store(pointer + E, second.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _load_codes(pointer, lower_ptr, amax_ptr, known, inside, E: tl.constexpr, CODE: tl.constexpr, FINE: tl.constexpr):
    """Decoded halves of heads in FP32: bf12 if FINE, else CODE; `lower_ptr`, `amax_ptr` to their own."""
    upper1, upper2 = load_inside(pointer, inside), load_inside(pointer + E, inside)
    amax = load_inside(amax_ptr, known).to(tl.float32)[:, None]
    if FINE:
        nibbles = load_inside(lower_ptr, inside).to(tl.int32)
        return load_bf12(upper1, nibbles & 15, amax), load_bf12(upper2, nibbles >> 4, amax)
    elif CODE == E4M3_CODE:
        upper1, upper2 = upper1.to(tl.float8e4nv, bitcast=True), upper2.to(tl.float8e4nv, bitcast=True)
    return decode(upper1, amax, CODE), decode(upper2, amax, CODE)


@triton.jit
def _store_codes(
    pointer, lower_ptr, amax_ptr, x1, x2, known, inside, E: tl.constexpr, CODE: tl.constexpr, FINE: tl.constexpr
):
    """Undone by `_load_codes`."""
    amax = max_magnitude(larger(tl.abs(x1), tl.abs(x2)), 1).to(tl.bfloat16)
    tl.store(amax_ptr, amax, mask=known)
    amax = amax.to(tl.float32)[:, None]
    if FINE:
        code1, code2 = pack_bf12(x1, amax), pack_bf12(x2, amax)
        _store_halves(pointer, E, (code1 >> 4).to(tl.int8), (code2 >> 4).to(tl.int8), inside)
        tl.store(lower_ptr, ((code1 & 15) | ((code2 & 15) << 4)).to(tl.uint8), mask=inside)
    else:
        code1, code2 = encode(x1, amax, CODE), encode(x2, amax, CODE)
        _store_halves(pointer, E, code1.to(tl.int8, bitcast=True), code2.to(tl.int8, bitcast=True), inside)


@triton.jit
def _take_heads(
    source_ptr, amax_ptr, center_ptr, codes_ptr, lower_ptr, offsets, centers, known, inside, E: tl.constexpr,
    HAS_CENTER: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr, CODE: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """The halves (BT * NH, EP) of heads, of which `known` exist, in FP32, decoded or encoded on the way."""
    if HAS_CENTER and not FINE:
        center1, center2 = load_halves(center_ptr + centers, E, inside)
    if DECODE:
        x1, x2 = _load_codes(source_ptr + offsets, lower_ptr, amax_ptr, known, inside, E, CODE, FINE)
        if HAS_CENTER and not FINE:
            x1, x2 = x1 + center1, x2 + center2
    else:
        x1, x2 = load_halves(source_ptr + offsets, E, inside)
    if ENCODE:
        c1, c2 = x1, x2
        if HAS_CENTER and not FINE:
            c1, c2 = x1 - center1, x2 - center2
        _store_codes(codes_ptr + offsets, lower_ptr, amax_ptr, c1, c2, known, inside, E, CODE, FINE)
    return x1, x2


@kernel
def _rope_kernel(
    source_ptr,  # (T, heads * D): values, or int8 codes if DECODE
    amax_ptr,  # (T, heads) BF16: written if ENCODE, read if DECODE
    codes_ptr,  # (T, heads * D) int8, written if ENCODE
    lower_ptr,  # (T, (num_q + num_kv) * E) uint8: lower bits of q and k; written if ENCODE, read if DECODE
    out_ptr,  # (T, heads * D); source_ptr if IN_PLACE
    center_ptr,  # (num_kv * D,) FP32: taken out of v before its codes, added after, if HAS_CENTER
    bound_ptr,  # int32: bits of MARGIN * max |v|, if ENCODE
    cos_ptr,  # (P, D)
    sin_ptr,  # (P, D)
    q_weight_ptr,  # (D,), if HEAD_NORM
    k_weight_ptr,  # (D,), if HEAD_NORM
    eps,
    T,
    P,
    num_q: tl.constexpr,
    num_kv: tl.constexpr,
    D: tl.constexpr,
    IN_PLACE: tl.constexpr,
    HAS_CENTER: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    ENCODE: tl.constexpr,
    DECODE: tl.constexpr,
    CODE: tl.constexpr,
    EP: tl.constexpr,
    NH: tl.constexpr,
    BT: tl.constexpr,
):
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
    # What all heads have in common is read for each of them: as vectors (EP,) it would take a detour by shared memory.
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
        _store_halves(out_ptr + offsets, E, y1, y2, inside)
    else:
        if ENCODE:
            seen = tl.load(bound_ptr, cache_modifier=".cg")
        x1, x2 = _take_heads(*places, known, inside, E, HAS_CENTER, ENCODE, DECODE, CODE, False)
        if ENCODE:
            raise_amax(bound_ptr, seen, max_magnitude(max_magnitude(larger(tl.abs(x1), tl.abs(x2)), 1), 0) * _MARGIN)
        if not IN_PLACE:
            _store_halves(out_ptr + offsets, E, x1, x2, inside)


def _launch_rope(
    source: Tensor,
    out: Tensor,
    kept: Sequence[Tensor],
    center: Optional[Tensor],
    code: str,
    tables: tuple[Optional[Tensor], ...],
    eps: float,
    num_q: int,
    num_kv: int,
) -> None:
    """source: values, which are encoded into the four of `kept` if given; or codes, decoded with the three of `kept`.

    tables: cos and sin or None; q's and k's norm weights or None.
    """
    center, cos, sin, q_weight, k_weight = dense(center, *tables)
    encodes, decodes = len(kept) == 4, len(kept) == 3
    codes, lower, amax, bound = (*kept, source, source, source, source)[:4]
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


@qk_rope.cuda
def _(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv):
    if (q_weight is None) != (k_weight is None):
        return qk_rope.reference(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv)
    qkv = qkv.contiguous()
    out = torch.empty_like(qkv)
    _launch_rope(qkv, out, (), None, "sqrt8", (cos, sin, q_weight, k_weight), eps, num_q, num_kv)
    return out


@qk_rope_encode12_.cuda
def _(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code):
    if (q_weight is None) != (k_weight is None):
        return qk_rope_encode12_.reference(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code)
    rotated, kept = qkv.contiguous(), _empty_kept(qkv, num_q, num_kv)
    _launch_rope(rotated, rotated, kept, center, code, (cos, sin, q_weight, k_weight), eps, num_q, num_kv)
    if rotated is not qkv:
        qkv.copy_(rotated)
    return *kept[:3], kept[3].view(torch.float32)


@qk_rope_decode12.cuda
def _(codes, lower, group_amax, center, cos, sin, num_q, num_kv, code, dtype):
    kept = dense(codes, lower, group_amax)
    out = codes.new_empty(codes.shape, dtype=dtype)
    _launch_rope(kept[0], out, kept, center, code, (cos, sin, None, None), 0.0, num_q, num_kv)
    return out
