"""Low-rank adapters (LoRA) beside the FP8 products of stacked linear layers: y += scaling * (x A^T) B^T, in 16 bits.

All adapters that read one input are one: A's rows one below the other, B block-diagonal, times the scaling. With the
layers' output gradient dy:

    h  = x A^T        (T, R)       y  += h B^T
    g  = dy B         (T, R)       dx += g A
    dA = g^T x        (R, K)       dB  = dy^T h, its blocks

Nothing is kept for them. The backward decodes x from what the block keeps for its norm, or computes it again for its
core, and makes h anew: a product of R columns. dy is needed in 16 bits; its rounding to FP8 would be the largest error
of dA and dB.

Legend: T tokens, K in, N out of all stacked layers, R rank of all adapters.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.block.order import RowPermutation
from overcoat.block.spec import Adapter, Linear, Norm
from overcoat.kernels.groups import group_decode
from overcoat.recipe import Recipe


class Input(NamedTuple):
    """What adapters read: x (T, K) * scale + shift, (K,) each or None. They are multiplied into A, which is small."""

    x: Tensor
    scale: Optional[Tensor] = None
    shift: Optional[Tensor] = None


def kept_input(kept: Any, norm: Optional[Norm], recipe: Recipe, dtype: torch.dtype) -> Input:
    """The input of a branch's first layers, from the codes that it keeps: its norm's output, or the stream itself."""
    x = group_decode(kept.codes, kept.group_amax, recipe.kept_format, recipe.group_size, dtype)
    return Input(x) if norm is None else Input(x, norm.weight, norm.bias)


class Stacked(NamedTuple):
    """All adapters of a `Linear` as one: a (R, K), b (N, R)."""

    a: Tensor
    b: Tensor


def stack_adapters(linear: Linear, dtype: torch.dtype) -> Stacked:
    """In `dtype`, with the rows of b in the operand's order, times the scalings."""
    a = torch.cat([adapter.a for adapter in linear.adapters]).to(dtype)
    b = a.new_zeros(sum(_sizes(linear)), a.shape[0])
    for adapter, rows, columns in _places(linear):
        own, order = adapter.b, _order(linear, adapter)
        b[rows, columns] = (own if order is None else order.take(own)) * (adapter.scaling * linear.scale)
    return Stacked(a, b)


def add_adapters_(y: Tensor, linear: Linear, inputs: Input) -> Tensor:
    """Adds what adapters make of their input to y (T, N)."""
    a, b = stack_adapters(linear, y.dtype)
    return y.addmm_(_down(a, inputs, y.dtype), b.t())


def _down(a: Tensor, inputs: Input, dtype: torch.dtype) -> Tensor:
    """h (T, R)."""
    x, scale, shift = inputs
    h = torch.mm(x, (a if scale is None else (a * scale).to(a.dtype)).t())
    # `to`: under autocast PyTorch's products return another dtype than FP32 tensors'.
    return (h if shift is None else h + torch.mv(a.float(), shift.float())).to(dtype)


def adapters_backward_(dy: Tensor, dx: Tensor, linear: Linear, inputs: Input) -> tuple[Adapter, ...]:
    """Adds the adapters' part to dx (T, K), and returns their gradients, from dy (T, N)."""
    stacked = stack_adapters(linear, dy.dtype)
    g = add_input_gradient_(dy, dx, stacked)
    return adapter_gradients(dy, g, linear, stacked, inputs)


def add_input_gradient_(dy: Tensor, dx: Tensor, stacked: Stacked) -> Tensor:
    """Adds the adapters' part to dx (T, K); returns g (T, R)."""
    g = torch.mm(dy, stacked.b)
    dx.addmm_(g, stacked.a)
    return g


def adapter_gradients(dy: Tensor, g: Tensor, linear: Linear, stacked: Stacked, inputs: Input) -> tuple[Adapter, ...]:
    """dA and dB of each adapter, from dy (T, N) and g (T, R)."""
    x, scale, shift = inputs
    da = torch.mm(g.t(), x)
    if scale is not None:
        da = da * scale
    if shift is not None:
        da = da + torch.outer(g.sum(0, dtype=torch.float32), shift.float())
    db = torch.mm(dy.t(), _down(stacked.a, inputs, dy.dtype))
    gradients = []
    for adapter, rows, columns in _places(linear):
        own, order = db[rows, columns] * (adapter.scaling * linear.scale), _order(linear, adapter)
        own = own if order is None else order.put_back(own)
        gradients.append(Adapter(da[columns].to(adapter.a.dtype), own.to(adapter.b.dtype), adapter.scaling))
    return tuple(gradients)


def _sizes(linear: Linear) -> list[int]:
    orders = linear.orders or (None,) * len(linear.weights)
    return [w.shape[0] if order is None else order.count(w) for w, order in zip(linear.weights, orders, strict=True)]


def _places(linear: Linear) -> list[tuple[Adapter, slice, slice]]:
    """Each adapter, its layer's rows among N, its own columns among R."""
    ends, places, rank = [0], [], 0
    for size in _sizes(linear):
        ends.append(ends[-1] + size)
    for adapter in linear.adapters:
        rows, columns = slice(ends[adapter.layer], ends[adapter.layer + 1]), slice(rank, rank + adapter.a.shape[0])
        places.append((adapter, rows, columns))
        rank += adapter.a.shape[0]
    return places


def _order(linear: Linear, adapter: Adapter) -> Optional[RowPermutation]:
    """How b's rows are taken; b is (N, r) where the weight is (K, N), too."""
    order = linear.orders[adapter.layer] if linear.orders else None
    return None if order is None else order._replace(transposed=False)
