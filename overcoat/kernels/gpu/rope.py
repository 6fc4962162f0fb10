"""Kernels of the forward in kernels/rope.py: rotation with the kept codes beside it, and decode and rotate again.

Bytes moved, with V = T * (num_q + 2 num_kv) * D * 2, the fused buffer (3 U for multi-head attention):

    qk_rope           1 V read, 1 V written
    qk_rope_encode12_   1 V read, 2/3 V written in place, 2/3 V of codes written
    qk_rope_decode12    2/3 V read, 1 V written

Everything equals the reference bit for bit, except with head norms (Qwen3): their mean is summed in another order.

A program takes one tile, NH heads of q, k or v of one token, and ends: so the next one's loads do not wait for its
stores, and there is nothing to mask. NH is a power of 2 that divides the heads of q as well as of k and v; where that
leaves little (one key head), a tile is of BT tokens. Tiles of a token follow each other, so all but the first find its
cos and sin in a cache, as all tokens do the center and the norms' weights.

Legend: T tokens, D head width, E = D / 2, EP = E rounded up to a power of 2, P positions in cos and sin.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.kernels.gpu.common import (
    CODES,
    E4M3_CODE,
    EXACT,
    decode,
    decode_bf12,
    encode,
    encode_bf12,
    larger,
    max_magnitude,
    power_of_2,
)
from overcoat.kernels.gpu.hardware import to_float32
from overcoat.kernels.gpu.launch import cdiv, dense, kernel, on_device
from overcoat.kernels.gpu.tiles import load_inside

# The most elements of a tile, each half of a head in EP of them, and how many a thread has.
HEAD_TILE, HEAD_ELEMENTS = 2048, 16
# Registers of a thread that encodes BF16; the compiler would take 54 to 56, and four programs less find room.
ENCODE_REGISTERS = 48


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


# ---- forward ----------------------------------------------------------------------------------------------------


@triton.jit
def _load_codes(pointer, lower_ptr, amax_ptr, known, inside, E: tl.constexpr, CODE: tl.constexpr, FINE: tl.constexpr):
    """Decoded halves of heads in FP32: bf12 if FINE, else CODE; `lower_ptr`, `amax_ptr` to their own."""
    upper1, upper2 = _load_halves(pointer, E, inside)
    amax = load_inside(amax_ptr, known).to(tl.float32)[:, None]
    if FINE:
        nibbles = load_inside(lower_ptr, inside).to(tl.int32)
        return decode_bf12(upper1, nibbles & 15, amax), decode_bf12(upper2, nibbles >> 4, amax)
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
        code1, code2 = encode_bf12(x1, amax), encode_bf12(x2, amax)
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
    """The halves (BT * NH, EP) of heads in FP32, decoded or encoded on the way.

    source_ptr and codes_ptr at the first token's row, amax_ptr and lower_ptr at the heads' own places; known: which of
    the heads exist; offsets and centers: of their elements.
    """
    if HAS_CENTER and not FINE:
        center1, center2 = _load_halves(center_ptr + centers, E, inside)
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
    center_ptr,  # (num_kv * D,) FP32: taken out of v before its codes, added after, if HAS_CENTER
    codes_ptr,  # (T, heads * D) int8, written if ENCODE
    lower_ptr,  # (T, (num_q + num_kv) * E) uint8: lower bits of q and k; written if ENCODE, read if DECODE
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
    if tile < (num_q + num_kv) // NH:
        if ROTATE:
            cos1, cos2 = load_halves(cos_ptr + place, E, inside)
            sin1, sin2 = load_halves(sin_ptr + place, E, inside)
        y1, y2 = _take_heads(
            source_ptr, amax_ptr + head, center_ptr, codes_ptr, lower_ptr, offsets, centers, known, inside, E,
            HAS_CENTER, ENCODE, DECODE, CODE, True,
        )  # fmt: skip
        if HEAD_NORM:
            weight_ptr = q_weight_ptr
            if tile >= num_q // NH:
                weight_ptr = k_weight_ptr
            y1, y2 = _head_norm(y1, y2, *load_halves(weight_ptr + first, E, inside), D, eps)
        if ROTATE:
            y1, y2 = y1 * cos1 - y2 * sin1, y2 * cos2 + y1 * sin2
        _store_halves(out_ptr + offsets, E, y1, y2, inside)
    else:
        x1, x2 = _take_heads(
            source_ptr, amax_ptr + head, center_ptr, codes_ptr, lower_ptr, offsets, centers, known, inside, E,
            HAS_CENTER, ENCODE, DECODE, CODE, False,
        )  # fmt: skip
        if not IN_PLACE:
            _store_halves(out_ptr + offsets, E, x1, x2, inside)


class _Kept(NamedTuple):
    """Codes int8, the lower bits of q and k, maxima, the vector taken out, and v's 8-bit code."""

    codes: Tensor
    lower: Tensor
    amax: Tensor
    center: Optional[Tensor]
    code: str


def _launch_rope(
    source: Tensor,
    out: Tensor,
    kept: Optional[_Kept],
    tables: tuple[Optional[Tensor], ...],
    eps: float,
    num_q: int,
    num_kv: int,
) -> None:
    """source: values, which are encoded into `kept` if it is given; or the codes of `kept`, which are decoded."""
    cos, sin, q_weight, k_weight = dense(*tables)
    codes, lower, amax, center, code = kept or (source, source, source, None, "sqrt8")
    cos, sin, rotated = (source, source, False) if cos is None else (cos, sin, True)
    tokens, heads = source.shape[0], num_q + 2 * num_kv
    width = source.shape[1] // heads
    half, common = power_of_2(width // 2), math.gcd(num_q, num_kv)
    count = min(common & -common, max(HEAD_TILE // (2 * half), 1))
    elements = 2 * half * count
    steps = 1 if 2 * elements >= HEAD_TILE else HEAD_TILE // elements
    encodes, decodes = kept is not None and source is not codes, source is codes and kept is not None
    if q_weight is not None and k_weight is not None and q_weight.dtype != k_weight.dtype:
        q_weight, k_weight = q_weight.float(), k_weight.float()
    with on_device(source):
        _rope_kernel[(cdiv(tokens, steps) * (heads // count),)](
            source, amax, source if center is None else center, codes, lower, out,
            cos, sin, cos if q_weight is None else q_weight,
            cos if k_weight is None else k_weight, eps, tokens, cos.shape[0], num_q, num_kv, width,
            out is source, center is not None, q_weight is not None, rotated, encodes, decodes,
            CODES[code], half, count, steps,
            num_warps=max(steps * elements // (32 * HEAD_ELEMENTS), 1),
            maxnreg=ENCODE_REGISTERS if encodes and source.dtype == torch.bfloat16 and steps == 1 else None,
            **EXACT,
        )  # fmt: skip


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
    """Normalise and rotate q and k into a new buffer."""
    qkv = qkv.contiguous()
    out = torch.empty_like(qkv)
    _launch_rope(qkv, out, None, (cos, sin, q_weight, k_weight), eps, num_q, num_kv)
    return out


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate in place; codes, lower bits and maxima of what was there before, v's minus center."""
    (tokens, columns), heads = qkv.shape, num_q + 2 * num_kv
    codes = torch.empty(qkv.shape, dtype=torch.int8, device=qkv.device)
    halves = (num_q + num_kv) * (columns // heads // 2)
    lower = torch.empty((tokens, halves), dtype=torch.uint8, device=qkv.device)
    amax = torch.empty((tokens, heads), dtype=torch.bfloat16, device=qkv.device)
    rotated, center = dense(qkv, center)
    kept = _Kept(codes, lower, amax, center, code)
    _launch_rope(rotated, rotated, kept, (cos, sin, q_weight, k_weight), eps, num_q, num_kv)
    if rotated is not qkv:
        qkv.copy_(rotated)
    return codes, lower, amax


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
    """Decode the kept q/k/v and rotate again, if cos and sin are given."""
    codes, lower, group_amax, center = dense(codes, lower, group_amax, center)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    kept = _Kept(codes, lower, group_amax, center, code)
    _launch_rope(codes, out, kept, (cos, sin, None, None), 0.0, num_q, num_kv)
    return out
