"""Heads of q, k and v: rotary position embedding, forward and backward, and the codes in which attention saves them.

q and k are saved in 12 bits (formats/bf12.py), v in an 8-bit code, one group per token and head:

    codes       int8 (T, (num_q + 2 num_kv) * D): the upper bits of q and k, then v's bytes
    lower       uint8 (T, (num_q + num_kv) * D/2): the lower bits of q and k, two in a byte
    group_amax  BF16 (T, num_q + 2 num_kv): the maximum of each head, of v less its center

If max |v| of a head is smaller than max |v - center|, v is saved without subtracting the center, and its maximum is
stored negative. Otherwise a v near 0 would get an error in proportion to the center. This matters where a row begins
with the padding token: v and o are 0 there, and the next norm's backward multiplies any error of o by 1 / sqrt(eps).

Legend: T tokens, D head width, E = D / 2, EP = E rounded up to a power of 2, P positions in cos and sin.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import Quantized, decode_groups, encode_groups, group_code
from overcoat.formats.bf12 import decode_bf12, encode_bf12
from overcoat.kernels.codes import E4M3_CODE, decode, encode, load_bf12, pack_bf12
from overcoat.kernels.device import larger, max_magnitude
from overcoat.kernels.instructions import to_float32
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import dense_rows
from overcoat.kernels.tiles import load_inside

# The smallest magnitude of a maximum stored negative: -0 is not below 0.
TINY = 2.0**-126
_TINY = tl.constexpr(TINY)


def split_heads(qkv: Tensor, num_q: int, num_kv: int) -> Tuple[Tensor, Tensor, Tensor]:
    """Split the fused buffer into q, k and v (T, heads, D) in FP32."""
    count = num_q + 2 * num_kv
    heads = qkv.contiguous().view(qkv.shape[0], count, qkv.shape[1] // count).float()
    q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
    return q, k, v


def per_token(table: Tensor, tokens: int) -> Tensor:
    """Repeat cos or sin (P, D) to (T, 1, D) FP32."""
    return table.float().repeat(tokens // table.shape[0], 1).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x (T, heads, D) by cos and sin (T, 1, D)."""
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


def rotate_back(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of `rotate`'s input from dy (T, heads, D) in FP32; cos and sin (P, D)."""
    cos, sin = per_token(cos, dy.shape[0]), per_token(sin, dy.shape[0])
    s1, s2 = (dy * sin).chunk(2, -1)
    return dy * cos + torch.cat((s2, -s1), -1)


def rope_gradient(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int) -> Tensor:
    """Return the gradient of the fused buffer (T, C) in FP32, from those of rotated q and k, and of v."""
    width = dq.shape[1] // num_q
    gq, gk, gv = (part.contiguous().unflatten(1, (-1, width)).float() for part in (dq, dk, dv))
    return torch.cat((rotate_back(gq, cos, sin), rotate_back(gk, cos, sin), gv), 1).flatten(1)


def buffer_columns(*parts: Tensor) -> int:
    """Return C, the columns of dq, dk and dv together."""
    return sum(part.shape[1] for part in parts)


def gradient_arguments(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return every backward kernel's arguments: dq, dk, dv, cos, sin; T, positions, num_q, num_kv, D, row strides."""
    parts, (positions, width) = [dense_rows(part) for part in (dq, dk, dv)], cos.shape
    strides = [part.stride(0) for part in parts]
    sizes = (dq.shape[0], positions, num_q, dk.shape[1] // width, width, *strides)
    return (*parts, cos.contiguous(), sin.contiguous()), sizes


@triton.jit
def load_halves(pointer, E, inside):
    """Load both halves of rows of a table or of heads, in FP32; `pointer` is to the first half, the second E after."""
    return to_float32(load_inside(pointer, inside)), to_float32(load_inside(pointer + E, inside))


@triton.jit
def store_halves(pointer, E, first, second, inside):
    """Store both halves of heads; `pointer` is to the first half, the second is E after."""
    tl.store(pointer, first.to(pointer.dtype.element_ty), mask=inside)
    tl.store(pointer + E, second.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_tables(cos_ptr, sin_ptr, position, e, inside, D, E):
    """Load the halves of cos and sin (rows, EP) at the rows' positions, in FP32."""
    place = position[:, None] * D + e[None, :]
    cos1, cos2 = load_halves(cos_ptr + place, E, inside)
    sin1, sin2 = load_halves(sin_ptr + place, E, inside)
    return cos1, cos2, sin1, sin2


@triton.jit
def load_rotated_back(dy_ptr, offsets, E, inside, cos1, cos2, sin1, sin2, ROTATE: tl.constexpr):
    """Load the halves (rows, EP) of heads' gradients in FP32, rotated back if ROTATE; zero outside."""
    d1 = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    d2 = tl.load(dy_ptr + offsets + E, mask=inside, other=0.0).to(tl.float32)
    if ROTATE:
        d1, d2 = d1 * cos1 + d2 * sin2, d2 * cos2 - d1 * sin1
    return d1, d2


def encode_heads(
    qkv: Tensor, center: Optional[Tensor], num_q: int, num_kv: int, code: str
) -> Tuple[Tensor, Tensor, Tensor]:
    """Encode qkv (T, (num_q + 2 num_kv) * D): codes, lower, group_amax. center: subtracted from v, (num_kv * D,) or
    None."""
    heads = num_q + num_kv
    qk, v = qkv.contiguous().float().unflatten(1, (heads + num_kv, -1)).split((heads, num_kv), 1)
    upper, lower, qk_amax = encode_bf12(qk)
    moved = v if center is None else v - center.view(num_kv, -1)
    stays = v.abs().amax(-1) < moved.abs().amax(-1)
    v, amax = encode_groups(torch.where(stays.unsqueeze(-1), v, moved), code, v.shape[2])
    v_amax = amax.view(-1, num_kv)
    v_amax = torch.where(stays, -v_amax.clamp(min=TINY), v_amax)
    codes = torch.cat((upper, v.view(torch.int8)), 1).flatten(1)
    return codes, lower.flatten(1), torch.cat((qk_amax, v_amax), 1)


def decode_heads(
    codes: Tensor, lower: Tensor, group_amax: Tensor, center: Optional[Tensor], num_q: int, num_kv: int, code: str
) -> Tensor:
    """Undo `encode_heads`; returns FP32."""
    heads, tokens = num_q + num_kv, codes.shape[0]
    qk, v = codes.unflatten(1, (heads + num_kv, -1)).split((heads, num_kv), 1)
    qk = decode_bf12(qk, lower.view(tokens, heads, -1), group_amax[:, :heads])
    v = v.contiguous().view(group_code(code).dtype)
    amax = group_amax[:, heads:]
    v = decode_groups(Quantized(v, amax.abs().reshape(-1, 1)), code, v.shape[2])
    if center is not None:
        v = v + torch.where(amax.unsqueeze(-1) < 0, 0.0, center.view(num_kv, -1))
    return torch.cat((qk, v), 1).flatten(1)


def empty_heads(qkv: Tensor, num_q: int, num_kv: int, code: str) -> Tuple[Tensor, Tensor, Tensor]:
    """Allocate the results of `encode_heads`. ValueError: the code does not have 8 bits, v's share of `codes`."""
    if group_code(code).bits != 8:
        raise ValueError(f"{code} has {group_code(code).bits} bits; attention saves v in a code of 8")
    (tokens, columns), heads = qkv.shape, num_q + 2 * num_kv
    lower = qkv.new_empty(tokens, (num_q + num_kv) * (columns // heads // 2), dtype=torch.uint8)
    amax = qkv.new_empty(tokens, heads, dtype=torch.bfloat16)
    return qkv.new_empty(*qkv.shape, dtype=torch.int8), lower, amax


@triton.jit
def load_codes(pointer, lower_ptr, amax_ptr, known, inside, E: tl.constexpr, CODE: tl.constexpr, FINE: tl.constexpr):
    """Load and decode both halves of heads to FP32: bf12 if FINE, else CODE."""
    upper1, upper2 = load_inside(pointer, inside), load_inside(pointer + E, inside)
    amax = load_inside(amax_ptr, known).to(tl.float32)[:, None]
    if FINE:
        nibbles = load_inside(lower_ptr, inside).to(tl.int32)
        return load_bf12(upper1, nibbles & 15, amax), load_bf12(upper2, nibbles >> 4, amax)
    elif CODE == E4M3_CODE:
        upper1, upper2 = upper1.to(tl.float8e4nv, bitcast=True), upper2.to(tl.float8e4nv, bitcast=True)
    amax = tl.abs(amax)
    return decode(upper1, amax, CODE), decode(upper2, amax, CODE)


@triton.jit
def head_magnitude(x1, x2):
    """Return the largest |x| of each head (rows,), from its halves."""
    return max_magnitude(larger(tl.abs(x1), tl.abs(x2)), 1)


@triton.jit
def store_codes(
    pointer, lower_ptr, amax_ptr, x1, x2, stays, known, inside, E: tl.constexpr, CODE: tl.constexpr, FINE: tl.constexpr
):
    """Encode and store both halves of heads, for `load_codes`. stays: heads (rows,) without center, or None."""
    amax = head_magnitude(x1, x2).to(tl.bfloat16).to(tl.float32)
    stored = amax
    if stays is not None:
        stored = tl.where(stays, -tl.maximum(amax, _TINY), amax)
    tl.store(amax_ptr, stored.to(tl.bfloat16), mask=known)
    amax = amax[:, None]
    if FINE:
        code1, code2 = pack_bf12(x1, amax), pack_bf12(x2, amax)
        store_halves(pointer, E, (code1 >> 4).to(tl.int8), (code2 >> 4).to(tl.int8), inside)
        tl.store(lower_ptr, ((code1 & 15) | ((code2 & 15) << 4)).to(tl.uint8), mask=inside)
    else:
        code1, code2 = encode(x1, amax, CODE), encode(x2, amax, CODE)
        store_halves(pointer, E, code1.to(tl.int8, bitcast=True), code2.to(tl.int8, bitcast=True), inside)
