"""Kernels of the forward in kernels/rope.py: rotation with the kept codes beside it, and decode and rotate again.

Bytes moved, with V = T * (num_q + 2 num_kv) * D * 2, the fused buffer (3 U for multi-head attention):

    qk_rope           1 V read, 1 V written
    qk_rope_encode_   1 V read, 2/3 V written in place, 1/2 V of codes written
    qk_rope_decode    1/2 V read, 1 V written

Everything equals the reference bit for bit, except with head norms (Qwen3): their mean is summed in another order.

Legend: T tokens, D head width, E = D / 2, EP = E rounded up to a power of 2, P positions in cos and sin, NH heads of a
tile.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import group_code
from overcoat.kernels.gpu.common import (
    CODES,
    EXACT,
    decode,
    encode,
    larger,
    max_magnitude,
    power_of_2,
)
from overcoat.kernels.gpu.launch import kernel, on_device

# (token, head) elements of one tile in the kernels that walk along a token's heads.
HEAD_TILE = 2048


@triton.jit
def load_halves(table_ptr, row, e, E, real):
    """The two halves (EP,) of a row of cos, sin (.., 2E) or of a head-norm weight, in FP32."""
    first = tl.load(table_ptr + row * 2 * E + e, mask=real, other=0.0).to(tl.float32)
    second = tl.load(table_ptr + row * 2 * E + E + e, mask=real, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _head_norm(x1, x2, w1, w2, D, eps):
    """RMSNorm of each head (NH, EP) + (NH, EP)."""
    rstd = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
    return x1 * rstd * w1, x2 * rstd * w2


# ---- forward ----------------------------------------------------------------------------------------------------


@triton.jit
def _take_heads(
    source_ptr, amax_ptr, codes_ptr, center_ptr, head, heads, e, D, E,
    HAS_CENTER: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """The halves (NH, EP) of some heads of a token in FP32, decoded or encoded on the way; all pointers at its row."""
    inside = (head < heads)[:, None] & (e < E)[None, :]
    first = head[:, None] * D + e[None, :]
    x1 = tl.load(source_ptr + first, mask=inside, other=0.0)
    x2 = tl.load(source_ptr + first + E, mask=inside, other=0.0)
    if HAS_CENTER:
        center1 = tl.load(center_ptr + first, mask=inside, other=0.0)
        center2 = tl.load(center_ptr + first + E, mask=inside, other=0.0)
    if DECODE:
        amax = tl.load(amax_ptr + head, mask=head < heads, other=0.0).to(tl.float32)[:, None]
        x1, x2 = decode(x1, amax, CODE), decode(x2, amax, CODE)
        if HAS_CENTER:
            x1, x2 = x1 + center1, x2 + center2
    else:
        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    if ENCODE:
        c1, c2 = x1, x2
        if HAS_CENTER:
            c1, c2 = x1 - center1, x2 - center2
        amax = larger(max_magnitude(c1, 1), max_magnitude(c2, 1)).to(tl.bfloat16)
        tl.store(amax_ptr + head, amax, mask=head < heads)
        amax = amax.to(tl.float32)[:, None]
        tl.store(codes_ptr + first, encode(c1, amax, CODE), mask=inside)
        tl.store(codes_ptr + first + E, encode(c2, amax, CODE), mask=inside)
    return x1, x2, first, inside


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
    heads,
    num_q,
    num_rotated,  # num_q + num_kv
    P,
    D,
    IN_PLACE: tl.constexpr,
    HAS_CENTER: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    ENCODE: tl.constexpr,
    DECODE: tl.constexpr,
    CODE: tl.constexpr,
    EP: tl.constexpr,
    NH: tl.constexpr,
):
    token, E = tl.program_id(0).to(tl.int64), D // 2
    source_ptr += token * heads * D
    codes_ptr += token * heads * D
    out_ptr += token * heads * D
    amax_ptr += token * heads
    e = tl.arange(0, EP)
    cos1, cos2 = load_halves(cos_ptr, token % P, e, E, e < E)
    sin1, sin2 = load_halves(sin_ptr, token % P, e, E, e < E)
    if HEAD_NORM:
        qw1, qw2 = load_halves(q_weight_ptr, 0, e, E, e < E)
        kw1, kw2 = load_halves(k_weight_ptr, 0, e, E, e < E)
    for head0 in range(0, num_rotated, NH):
        head = head0 + tl.arange(0, NH)
        y1, y2, first, inside = _take_heads(
            source_ptr, amax_ptr, codes_ptr, center_ptr, head, num_rotated, e, D, E, HAS_CENTER, ENCODE, DECODE, CODE
        )
        if HEAD_NORM:
            is_q = (head < num_q)[:, None]
            w1, w2 = tl.where(is_q, qw1[None, :], kw1[None, :]), tl.where(is_q, qw2[None, :], kw2[None, :])
            y1, y2 = _head_norm(y1, y2, w1, w2, D, eps)
        r1, r2 = y1 * cos1[None, :] - y2 * sin1[None, :], y2 * cos2[None, :] + y1 * sin2[None, :]
        tl.store(out_ptr + first, r1.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + first + E, r2.to(out_ptr.dtype.element_ty), mask=inside)
    for head0 in range(num_rotated, heads, NH):
        head = head0 + tl.arange(0, NH)
        x1, x2, first, inside = _take_heads(
            source_ptr, amax_ptr, codes_ptr, center_ptr, head, heads, e, D, E, HAS_CENTER, ENCODE, DECODE, CODE
        )
        if not IN_PLACE:
            tl.store(out_ptr + first, x1.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(out_ptr + first + E, x2.to(out_ptr.dtype.element_ty), mask=inside)


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
    cos, sin, q_weight, k_weight = tables
    tokens, heads = source.shape[0], num_q + 2 * num_kv
    width = source.shape[1] // heads
    half = power_of_2(width // 2)
    with on_device(source):
        _rope_kernel[(tokens,)](
            source, source if amax is None else amax, source if center is None else center,
            source if codes is None else codes, out,
            cos.contiguous(), sin.contiguous(), cos if q_weight is None else q_weight,
            cos if k_weight is None else k_weight, eps, heads, num_q, num_q + num_kv, cos.shape[0], width,
            out is source, center is not None, q_weight is not None, codes is not None,
            codes is None and amax is not None, CODES[code],
            half, min(max(HEAD_TILE // (2 * half), 1), power_of_2(heads)), num_warps=4, **EXACT,
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
    _launch_rope(qkv, None, None, None, out, (cos, sin, q_weight, k_weight), eps, num_q, num_kv, "sqrt8")
    return out


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
) -> tuple[Tensor, Tensor]:
    """Rotate in place; codes (T, heads * D) and maxima (T, heads) of what was there before, minus center."""
    codes = torch.empty(qkv.shape, dtype=group_code(code).dtype, device=qkv.device)
    amax = torch.empty((qkv.shape[0], num_q + 2 * num_kv), dtype=torch.bfloat16, device=qkv.device)
    _launch_rope(qkv, amax, center, codes, qkv, (cos, sin, q_weight, k_weight), eps, num_q, num_kv, code)
    return codes, amax


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
    """Decode the kept q/k/v and rotate again."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    _launch_rope(codes, group_amax, center, None, out, (cos, sin, q_weight, k_weight), eps, num_q, num_kv, code)
    return out
