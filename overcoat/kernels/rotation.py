"""Rotary position embedding of heads, forth and back: what rope.py and the kernels of its backward share.

Legend: T tokens, D head width, E = D / 2, EP = E rounded up to a power of 2, P positions in cos and sin.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from overcoat.kernels.instructions import to_float32
from overcoat.kernels.language import tl, triton
from overcoat.kernels.tiles import load_inside


def split_heads(qkv: Tensor, num_q: int, num_kv: int) -> Tuple[Tensor, Tensor, Tensor]:
    """The fused buffer's q, k and v (T, heads, D) in FP32."""
    count = num_q + 2 * num_kv
    heads = qkv.contiguous().view(qkv.shape[0], count, qkv.shape[1] // count).float()
    q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
    return q, k, v


def per_token(table: Tensor, tokens: int) -> Tensor:
    """cos or sin (P, D) as (T, 1, D) FP32."""
    return table.float().repeat(tokens // table.shape[0], 1).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (T, heads, D), cos and sin (T, 1, D)."""
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


def rotate_back(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads' gradients (T, heads, D) in FP32, cos and sin (P, D)."""
    cos, sin = per_token(cos, dy.shape[0]), per_token(sin, dy.shape[0])
    s1, s2 = (dy * sin).chunk(2, -1)
    return dy * cos + torch.cat((s2, -s1), -1)


@triton.jit
def load_halves(pointer, E, inside):
    """The two halves of rows of a table or of heads, in FP32; `pointer` to elements of the first, E apart."""
    return to_float32(load_inside(pointer, inside)), to_float32(load_inside(pointer + E, inside))


@triton.jit
def store_halves(pointer, E, first, second, inside):
    """The two halves of heads; `pointer` to elements of the first, E apart."""
    tl.store(pointer, first.to(pointer.dtype.element_ty), mask=inside)
    tl.store(pointer + E, second.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_tables(cos_ptr, sin_ptr, position, e, inside, D, E):
    """The halves of cos and sin (rows, EP) at the rows' positions, in FP32."""
    place = position[:, None] * D + e[None, :]
    cos1, cos2 = load_halves(cos_ptr + place, E, inside)
    sin1, sin2 = load_halves(sin_ptr + place, E, inside)
    return cos1, cos2, sin1, sin2
