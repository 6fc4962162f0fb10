"""Attention's output gate: h = o * sigmoid(g), where g (T, C) is made of the same input as q, k and v (Qwen3.5, Afmoe).

    gate             h, and max |h| for its FP8 scale, in one pass
    gate_backward    do = dh sigmoid(g),  dg = dh o sigmoid(g) (1 - sigmoid(g))

Both compute in FP32 and round once, to o's dtype; sigmoid(g) is computed again in the backward. Bytes moved, with
V = T * C * 2:

    gate             2 V read, V written
    gate_backward    3 V read, 2 V written

The kernels equal their references bit for bit: both use the GPU's exp2 and reciprocal (hardware.py).

Legend: T tokens, C = num_q * D columns, N = T * C.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from overcoat.kernels import hardware, quantize
from overcoat.kernels.device import EXACT, LOG2E, max_magnitude
from overcoat.kernels.instructions import exp2, reciprocal
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense, kernel
from overcoat.kernels.op import op
from overcoat.kernels.tiles import load_inside, raise_amax

# Elements of a program.
TILE = 2048


def _sigmoid(x: Tensor) -> Tensor:
    return hardware.reciprocal(1.0 + hardware.exp2(x * -hardware.LOG2E))


@triton.jit
def _sigmoid_of(x):
    return reciprocal(1.0 + exp2(x * -LOG2E))


@op
def gate(o: Tensor, g: Tensor) -> Tuple[Tensor, Tensor]:
    """Return h = o * sigmoid(g) (T, C) in o's dtype, and max |h|, 0-d FP32."""
    h = (o.contiguous().float() * _sigmoid(g.contiguous().float())).to(o.dtype)
    return h, quantize.amax.reference(h)


@gate.fake
def _(o, g):
    return o.new_empty(o.shape), o.new_empty((), dtype=torch.float32)


@kernel
def _gate_kernel(
    o_ptr,  # (N,)
    g_ptr,  # (N,)
    h_ptr,  # (N,)
    top_ptr,  # 0-d FP32: max |h|
    N, BLOCK: tl.constexpr,
):  # fmt: skip
    seen = tl.load(top_ptr, cache_modifier=".cg")
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < N
    o = load_inside(o_ptr + place, inside).to(tl.float32)
    h = (o * _sigmoid_of(load_inside(g_ptr + place, inside).to(tl.float32))).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + place, h, mask=inside)
    raise_amax(top_ptr, seen, max_magnitude(h.to(tl.float32), 0))


@gate.cuda
def _(o, g):
    o, g = dense(o, g)
    h, top = torch.empty_like(o), o.new_zeros((), dtype=torch.float32)
    _gate_kernel[(cdiv(o.numel(), TILE),)](o, g, h, top, o.numel(), TILE, num_warps=4, **EXACT)
    return h, top


@op
def gate_backward(dh: Tensor, o: Tensor, g: Tensor) -> Tuple[Tensor, Tensor]:
    """Return the gradients of o and g (T, C) in dh's dtype, from dh (T, C)."""
    dh, o, s = dh.contiguous(), o.contiguous().float(), _sigmoid(g.contiguous().float())
    do = dh.float() * s
    return do.to(dh.dtype), (do * o * (1.0 - s)).to(dh.dtype)


@gate_backward.fake
def _(dh, o, g):
    return dh.new_empty(dh.shape), dh.new_empty(dh.shape)


@kernel
def _gate_backward_kernel(
    dh_ptr,  # (N,)
    o_ptr,  # (N,)
    g_ptr,  # (N,)
    do_ptr,  # (N,)
    dg_ptr,  # (N,)
    N, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < N
    s = _sigmoid_of(load_inside(g_ptr + place, inside).to(tl.float32))
    do = load_inside(dh_ptr + place, inside).to(tl.float32) * s
    dg = do * load_inside(o_ptr + place, inside).to(tl.float32) * (1.0 - s)
    tl.store(do_ptr + place, do.to(do_ptr.dtype.element_ty), mask=inside)
    tl.store(dg_ptr + place, dg.to(dg_ptr.dtype.element_ty), mask=inside)


@gate_backward.cuda
def _(dh, o, g):
    dh, o, g = dense(dh, o, g)
    do, dg = torch.empty_like(dh), torch.empty_like(dh)
    _gate_backward_kernel[(cdiv(dh.numel(), TILE),)](dh, o, g, do, dg, dh.numel(), TILE, num_warps=4, **EXACT)
    return do, dg
