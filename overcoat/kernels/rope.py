"""Rotary position embedding on the fused q/k/v buffer, with the optional per-head norm of q and k (Qwen3).

The buffer's columns are [q heads | k heads | v heads], each head D wide. With (x1, x2) the two halves of a head,

    rotate((x1, x2)) = (x1 * cos1 - x2 * sin1,  x2 * cos2 + x1 * sin2)

and, where the model normalises q and k, each head passes RMSNorm first: x <- x * rstd * weight. v passes unchanged.

The op is cheap to run again, so attention keeps its *input* in 8 bits, one group per token and head, and rebuilds the
rotated q and k in the backward. Bytes moved, with V = T * (num_q + 2 num_kv) * D * 2, the fused buffer (3 U for
multi-head attention):

    qk_rope           1 V read, 1 V written
    qk_rope_encode_   1 V read, 2/3 V written in place, 1/2 V of codes written
    qk_rope_decode    1/2 V read, 1 V written

Everything equals the reference bit for bit, except with head norms: their mean is summed in another order.

A program takes one tile, NH heads of q, k or v of one token, and ends: so the next one's loads do not wait for its
stores, and there is nothing to mask. NH is a power of 2 that divides the heads of q as well as of k and v; where that
leaves little (one key head), a tile is of BT tokens. Tiles of a token follow each other, so all but the first find its
cos and sin in a cache, as all tokens do the center and the norms' weights.

Legend: T tokens = batch * sequence, D head width, E = D / 2, EP = E rounded up to a power of 2, P positions in cos and
sin (P = T, or the sequence length when all batch rows share them: token t uses row t mod P).
"""

from __future__ import annotations

import math
from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import group_code
from overcoat.kernels.codes import CODES, decode, encode
from overcoat.kernels.device import EXACT, larger, max_magnitude, power_of_2
from overcoat.kernels.groups import group_decode, group_encode
from overcoat.kernels.instructions import to_float32
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense, kernel, on_device
from overcoat.kernels.op import op
from overcoat.kernels.tiles import load_inside

# The most elements of a tile, each half of a head in EP of them, and how many a thread has.
HEAD_TILE, HEAD_ELEMENTS = 2048, 16
# Registers of a thread that encodes BF16; the compiler would take 54 to 56, and four programs less find room.
ENCODE_REGISTERS = 48


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
def qk_rope_encode_(
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
) -> Tuple[Tensor, Tensor]:
    """`qk_rope` in place; returns what was there before, minus center, as codes (T, ...) and BF16 maxima (T, heads)."""
    codes, amax = group_encode.reference(qkv, center, code, qkv.shape[1] // (num_q + 2 * num_kv))
    qkv.copy_(qk_rope.reference(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv))
    return codes, amax


@qk_rope_encode_.fake
def _(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code):
    amax = qkv.new_empty((qkv.shape[0], num_q + 2 * num_kv), dtype=torch.bfloat16)
    return qkv.new_empty(qkv.shape, dtype=group_code(code).dtype), amax


@op
def qk_rope_decode(
    codes: Tensor,
    group_amax: Tensor,
    center: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    eps: float,
    num_q: int,
    num_kv: int,
    code: str,
    dtype: torch.dtype,
) -> Tensor:
    """Decode q/k/v from `qk_rope_encode_` and normalise and rotate q and k again; rounded once, to `dtype`."""
    width = codes.shape[1] // group_amax.shape[1]
    values = group_decode.reference(codes, group_amax, center, code, width, torch.float32)
    return qk_rope.reference(values, cos, sin, q_weight, k_weight, eps, num_q, num_kv).to(dtype)


@qk_rope_decode.fake
def _(codes, group_amax, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code, dtype):
    return codes.new_empty(codes.shape, dtype=dtype)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _load_halves(pointer, E, inside):
    """Elements at `pointer` and E further on, as they are."""
    return load_inside(pointer, inside), load_inside(pointer + E, inside)


@triton.jit
def load_halves(pointer, E, inside):
    """The two halves of rows of a table or of heads, in FP32; `pointer` to elements of the first."""
    first, second = _load_halves(pointer, E, inside)
    return to_float32(first), to_float32(second)


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
def _take_heads(
    source_ptr, amax_ptr, center_ptr, codes_ptr, head, offsets, centers, known, inside, E: tl.constexpr,
    HAS_CENTER: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """The halves (BT * NH, EP) of heads in FP32, decoded or encoded on the way; all pointers at the first token's row.

    head: (BT * NH,) numbers from there on, of which `known` exist; offsets and centers: of their elements.
    """
    x1, x2 = _load_halves(source_ptr + offsets, E, inside)
    if HAS_CENTER:
        center1, center2 = _load_halves(center_ptr + centers, E, inside)
    if DECODE:
        amax = load_inside(amax_ptr + head, known).to(tl.float32)[:, None]
        x1, x2 = decode(x1, amax, CODE), decode(x2, amax, CODE)
        if HAS_CENTER:
            x1, x2 = x1 + center1, x2 + center2
    else:
        x1, x2 = to_float32(x1), to_float32(x2)
    if ENCODE:
        c1, c2 = x1, x2
        if HAS_CENTER:
            c1, c2 = x1 - center1, x2 - center2
        amax = max_magnitude(larger(tl.abs(c1), tl.abs(c2)), 1).to(tl.bfloat16)
        tl.store(amax_ptr + head, amax, mask=known)
        amax = amax.to(tl.float32)[:, None]
        _store_halves(codes_ptr + offsets, E, encode(c1, amax, CODE), encode(c2, amax, CODE), inside)
    return x1, x2


@kernel
def _rope_kernel(
    source_ptr,  # (T, heads * D): values, or codes if DECODE
    amax_ptr,  # (T, heads) BF16: written if ENCODE, read if DECODE
    center_ptr,  # (heads * D,) FP32: taken out before the codes, added after, if HAS_CENTER
    codes_ptr,  # (T, heads * D), written if ENCODE
    out_ptr,  # (T, heads * D); source_ptr if IN_PLACE
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
    out_ptr += row * D
    r, e = tl.arange(0, BT * NH), tl.arange(0, EP)
    # What all heads have in common is read for each of them: as vectors (EP,) it would take a detour by shared memory.
    first = tl.zeros((BT * NH, 1), tl.int32) + e[None, :]
    inside = None if E == EP else first < E
    if BT == 1:
        head, center, known = tile * NH + r, tile * NH + r, None
        cos_ptr += (token % P).to(tl.int64) * D
        sin_ptr += (token % P).to(tl.int64) * D
        place = first
    else:
        step, center = r // NH, tile * NH + r % NH
        head, known = step * heads + center, step < T - token
        place = ((token + step) % P)[:, None] * D + first
        inside = known[:, None] & (first < E)
    offsets, centers = head[:, None] * D + e[None, :], center[:, None] * D + e[None, :]
    if tile < (num_q + num_kv) // NH:
        cos1, cos2 = load_halves(cos_ptr + place, E, inside)
        sin1, sin2 = load_halves(sin_ptr + place, E, inside)
        y1, y2 = _take_heads(
            source_ptr, amax_ptr, center_ptr, codes_ptr, head, offsets, centers, known, inside, E,
            HAS_CENTER, ENCODE, DECODE, CODE,
        )  # fmt: skip
        if HEAD_NORM:
            weight_ptr = q_weight_ptr
            if tile >= num_q // NH:
                weight_ptr = k_weight_ptr
            y1, y2 = _head_norm(y1, y2, *load_halves(weight_ptr + first, E, inside), D, eps)
        _store_halves(out_ptr + offsets, E, y1 * cos1 - y2 * sin1, y2 * cos2 + y1 * sin2, inside)
    else:
        x1, x2 = _take_heads(
            source_ptr, amax_ptr, center_ptr, codes_ptr, head, offsets, centers, known, inside, E,
            HAS_CENTER, ENCODE, DECODE, CODE,
        )  # fmt: skip
        if not IN_PLACE:
            _store_halves(out_ptr + offsets, E, x1, x2, inside)


def _launch_rope(
    source: Tensor,
    amax: Optional[Tensor],
    center: Optional[Tensor],
    codes: Optional[Tensor],
    out: Tensor,
    tables: tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]],
    eps: float,
    num_q: int,
    num_kv: int,
    code: str,
) -> None:
    cos, sin, q_weight, k_weight = dense(*tables)
    tokens, heads = source.shape[0], num_q + 2 * num_kv
    width = source.shape[1] // heads
    half, common = power_of_2(width // 2), math.gcd(num_q, num_kv)
    count = min(common & -common, max(HEAD_TILE // (2 * half), 1))
    elements = 2 * half * count
    steps = 1 if 2 * elements >= HEAD_TILE else HEAD_TILE // elements
    if q_weight is not None and k_weight is not None and q_weight.dtype != k_weight.dtype:
        q_weight, k_weight = q_weight.float(), k_weight.float()
    with on_device(source):
        _rope_kernel[(cdiv(tokens, steps) * (heads // count),)](
            source, source if amax is None else amax, source if center is None else center,
            source if codes is None else codes, out,
            cos, sin, cos if q_weight is None else q_weight,
            cos if k_weight is None else k_weight, eps, tokens, cos.shape[0], num_q, num_kv, width,
            out is source, center is not None, q_weight is not None, codes is not None,
            codes is None and amax is not None, CODES[code], half, count, steps,
            num_warps=max(steps * elements // (32 * HEAD_ELEMENTS), 1),
            maxnreg=ENCODE_REGISTERS if codes is not None and source.dtype == torch.bfloat16 and steps == 1 else None,
            **EXACT,
        )  # fmt: skip


@qk_rope.cuda
def _(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv):
    if (q_weight is None) != (k_weight is None):
        return qk_rope.reference(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv)
    qkv = qkv.contiguous()
    out = torch.empty_like(qkv)
    _launch_rope(qkv, None, None, None, out, (cos, sin, q_weight, k_weight), eps, num_q, num_kv, "sqrt8")
    return out


@qk_rope_encode_.cuda
def _(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code):
    if (q_weight is None) != (k_weight is None):
        return qk_rope_encode_.reference(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code)
    codes = torch.empty(qkv.shape, dtype=group_code(code).dtype, device=qkv.device)
    amax = torch.empty((qkv.shape[0], num_q + 2 * num_kv), dtype=torch.bfloat16, device=qkv.device)
    rotated, center = dense(qkv, center)
    _launch_rope(rotated, amax, center, codes, rotated, (cos, sin, q_weight, k_weight), eps, num_q, num_kv, code)
    if rotated is not qkv:
        qkv.copy_(rotated)
    return codes, amax


@qk_rope_decode.cuda
def _(codes, group_amax, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code, dtype):
    if (q_weight is None) != (k_weight is None):
        return qk_rope_decode.reference(
            codes, group_amax, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code, dtype
        )
    codes, group_amax, center = dense(codes, group_amax, center)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    _launch_rope(codes, group_amax, center, None, out, (cos, sin, q_weight, k_weight), eps, num_q, num_kv, code)
    return out
