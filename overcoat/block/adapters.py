"""Adapters of a linear layer: LoRA and DoRA, beside its GEMMs in 16 bits.

LoRA adds y += scaling * (x A^T) B^T. All adapters that read one input are
stacked: the As as rows, the Bs block-diagonal, times the scaling. With the layers' output gradient dy:

    h  = x A^T        (T, R)       y  += h B^T
    g  = dy B         (T, R)       dx += g A
    dA = g^T x        (R, K)       dB  = dy^T h, its blocks

With dropout each adapter reads its own dropout(x), whose elements the backward finds again by a seed.

DoRA (arXiv 2402.09353) multiplies each row of a layer's result v = x W^T + h B^T by f = magnitude / norm of the row of
W + scaling B A, which is a constant for the gradient (section 4.3): y = f v + bias. The norms are found outside
(models/lora.py). df = sum over the tokens of dy v takes one GEMM more, to recompute v; dy f goes on in dy's place.

They save nothing: the backward takes x from the codes saved for the norm or the mixer, and recomputes h, a GEMM of R
columns. dy stays in 16 bits: its rounding to FP8 would be the largest error of dA and dB.

Legend: T tokens, K in, N out of all stacked layers, R rank of all adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.block.linear import linear_forward, split_gradients, stack_biases
from overcoat.block.spec import Adapter, Block, Linear, Norm, RowPermutation
from overcoat.kernels.groups import group_decode
from overcoat.recipe import Recipe


class Input(NamedTuple):
    """Input of adapters: x (T, K) * scale + shift, with scale and shift (K,) or None; they are multiplied into A."""

    x: Tensor
    scale: Optional[Tensor] = None
    shift: Optional[Tensor] = None


def kept_input(saved: Any, norm: Optional[Norm], recipe: Recipe, dtype: torch.dtype) -> Input:
    """Return the input of a branch's first layers, decoded: its norm's output, or without a norm the stream itself."""
    x = group_decode(saved.codes, saved.group_amax, recipe.kept_format, recipe.group_size, dtype)
    return Input(x) if norm is None else Input(x, norm.weight, norm.bias)


class Stacked(NamedTuple):
    """All adapters of a `Linear` as one: a (R, K), b (N, R)."""

    a: Tensor
    b: Tensor


def stack_adapters(linear: Linear, dtype: torch.dtype) -> Stacked:
    """Stack a `Linear`'s adapters in `dtype`; b's rows are in the operand's order, times the scalings."""
    a = torch.cat([adapter.a for adapter in linear.adapters]).to(dtype)
    b = a.new_zeros(sum(_sizes(linear)), a.shape[0])
    for adapter, rows, columns in _places(linear):
        own, order = adapter.b, _order(linear, adapter)
        b[rows, columns] = (own if order is None else order.take(own)) * (adapter.scaling * linear.scale)
    return Stacked(a, b)


def add_adapters_(y: Tensor, linear: Linear, inputs: Input, residual: Optional[Tensor] = None) -> Tensor:
    """Add the adapters' result h B^T to y (T, N) in place, multiply by DoRA's factors, and add a residual."""
    a, b = stack_adapters(linear, y.dtype)
    y.addmm_(_down(a, linear, inputs, y.dtype), b.t())
    if linear.adapters and has_factors(linear):
        bias, factors = stack_biases(linear), _factors(linear)
        y.mul_(factors) if bias is None else y.sub_(bias).mul_(factors).add_(bias)
    return y if residual is None else y.add_(residual)


def has_factors(linear: Linear) -> bool:
    """True if an adapter is DoRA's."""
    return any(adapter.factor is not None for adapter in linear.adapters)


def _factors(linear: Linear) -> Tensor:
    """Return DoRA's factors (N,) FP32 in the operand's order, 1 for layers without."""
    factors = linear.adapters[0].a.new_ones(sum(_sizes(linear)), dtype=torch.float32)
    for adapter, rows, _ in _places(linear):
        if (own := adapter.factor) is not None:
            order = _order(linear, adapter)
            factors[rows] = (own if order is None else order.take(own)).float()
    return factors


class FactorGradients(NamedTuple):
    """Gradients of each adapter's factors, and of the biases, which are added behind them; empty without DoRA."""

    factors: Sequence[Optional[Tensor]] = ()
    biases: Optional[tuple[Optional[Tensor], ...]] = None


def before_factors(
    dy: Tensor, linear: Linear, inputs: Input, w_amax: Optional[Tensor], recipe: Recipe
) -> tuple[Tensor, FactorGradients]:
    """Return the gradient of v (T, N), what DoRA's factors multiply, and of what lies behind it, from dy (T, N)."""
    without = linear._replace(biases=(None,) * len(linear.weights), operand=None)
    v, _ = linear_forward(_whole(inputs), without, dy.dtype, recipe, w_amax=w_amax)
    a, b = stack_adapters(linear, dy.dtype)
    v.addmm_(_down(a, linear, inputs, dy.dtype), b.t())
    summed = v.mul_(dy).sum(0, dtype=torch.float32)
    found: list[Optional[Tensor]] = []
    for adapter, rows, _ in _places(linear):
        own, order = summed[rows], _order(linear, adapter)
        own = own if order is None else order.put_back(own)
        found.append(None if adapter.factor is None else own.to(adapter.factor.dtype))
    sums = dy.sum(0, dtype=torch.float32) * linear.scale if linear.has_bias else None
    biases = None if sums is None else split_gradients(None, sums, linear)[1]
    return (dy * _factors(linear)).to(dy.dtype), FactorGradients(found, biases)


def _down(a: Tensor, linear: Linear, inputs: Input, dtype: torch.dtype) -> Tensor:
    """Return h = x A^T (T, R)."""
    x, scale, shift = inputs
    if has_dropout(linear):
        x = _whole(inputs)
        parts = [torch.mm(dropped(x, adapter), a[columns].t()) for adapter, _, columns in _places(linear)]
        return torch.cat(parts, 1).to(dtype)
    h = torch.mm(x, (a if scale is None else (a * scale).to(a.dtype)).t())
    # `to`: under autocast `torch.mm` of FP32 tensors returns 16 bits.
    return (h if shift is None else h + torch.mv(a.float(), shift.float())).to(dtype)


def adapters_backward_(
    dy: Tensor, dx: Tensor, linear: Linear, inputs: Input, dfactors: Sequence[Optional[Tensor]]
) -> tuple[Adapter, ...]:
    """Add the adapters' part to dx (T, K) in place, and return their gradients, from dy (T, N), with `dfactors`."""
    stacked = stack_adapters(linear, dy.dtype)
    g = add_input_gradient_(dy, dx, linear, stacked)
    return adapter_gradients(dy, g, linear, stacked, inputs, dfactors)


def add_input_gradient_(dy: Tensor, dx: Tensor, linear: Linear, stacked: Stacked) -> Tensor:
    """Add the adapters' part to dx (T, K) in place, and return g = dy B (T, R)."""
    g = torch.mm(dy, stacked.b)
    if not has_dropout(linear):
        dx.addmm_(g, stacked.a)
        return g
    for adapter, _, columns in _places(linear):
        dx.add_(dropped(torch.mm(g[:, columns], stacked.a[columns]), adapter))
    return g


def adapter_gradients(
    dy: Tensor,
    g: Tensor,
    linear: Linear,
    stacked: Stacked,
    inputs: Input,
    dfactors: Sequence[Optional[Tensor]],
) -> tuple[Adapter, ...]:
    """Return dA and dB of each adapter, from dy (T, N) and g (T, R), with `dfactors`."""
    x, scale, shift = inputs
    if has_dropout(linear):
        x = _whole(inputs)
        da = torch.cat([torch.mm(g[:, columns].t(), dropped(x, adapter)) for adapter, _, columns in _places(linear)])
    else:
        da = torch.mm(g.t(), x)
        if scale is not None:
            da = da * scale
        if shift is not None:
            da = da + torch.outer(g.sum(0, dtype=torch.float32), shift.float())
    db = torch.mm(dy.t(), _down(stacked.a, linear, inputs, dy.dtype))
    gradients = []
    for (adapter, rows, columns), factor in zip_longest(_places(linear), dfactors):
        own, order = db[rows, columns] * (adapter.scaling * linear.scale), _order(linear, adapter)
        own = own if order is None else order.put_back(own)
        da_own = da[columns].to(adapter.a.dtype)
        gradients.append(Adapter(da_own, own.to(adapter.b.dtype), adapter.scaling, factor=factor))
    return tuple(gradients)


def has_dropout(linear: Linear) -> bool:
    """True if an adapter reads its input with dropout."""
    return any(adapter.dropout for adapter in linear.adapters)


def dropped(x: Tensor, adapter: Adapter) -> Tensor:
    """Return x (T, K) with an adapter's dropout: the same elements each time, forward and backward, by its seed."""
    if not adapter.dropout:
        return x
    generator = torch.Generator(x.device).manual_seed(adapter.seed)
    stays = torch.empty(x.shape, dtype=torch.uint8, device=x.device)  # alike for all dtypes of x
    stays.bernoulli_(1.0 - adapter.dropout, generator=generator)
    return (x * stays).mul_(1.0 / (1.0 - adapter.dropout))


def with_seeds(block: Block) -> Block:
    """Return the block with new seeds for its adapters' dropout, drawn on the host: recomputations that restore
    PyTorch's generators repeat them."""

    def seeded(linear: Linear) -> Linear:
        if not has_dropout(linear):
            return linear
        seeds = torch.randint(2**62, (len(linear.adapters),), device="cpu").tolist()
        adapters = [each._replace(seed=seed) for each, seed in zip(linear.adapters, seeds, strict=True)]
        return linear._replace(adapters=tuple(adapters))

    for branch in block.branches:
        if branch.in_proj.adapters or branch.out_proj.adapters:
            break
    else:
        return block
    made = [each._replace(in_proj=seeded(each.in_proj), out_proj=seeded(each.out_proj)) for each in block.branches]
    return block._replace(branches=tuple(made))


def _whole(inputs: Input) -> Tensor:
    """Return the input itself, (T, K) in x's dtype."""
    x, scale, shift = inputs
    x = x if scale is None else x * scale
    return (x if shift is None else x + shift).to(inputs.x.dtype)


def _sizes(linear: Linear) -> list[int]:
    orders = linear.orders or (None,) * len(linear.weights)
    return [w.shape[0] if order is None else order.count(w) for w, order in zip(linear.weights, orders, strict=True)]


def _places(linear: Linear) -> list[tuple[Adapter, slice, slice]]:
    """Return each adapter with its layer's rows among N and its own columns among R."""
    ends, places, rank = [0], [], 0
    for size in _sizes(linear):
        ends.append(ends[-1] + size)
    for adapter in linear.adapters:
        rows, columns = slice(ends[adapter.layer], ends[adapter.layer + 1]), slice(rank, rank + adapter.a.shape[0])
        places.append((adapter, rows, columns))
        rank += adapter.a.shape[0]
    return places


def _order(linear: Linear, adapter: Adapter) -> Optional[RowPermutation]:
    """Return the row permutation of b, or None. b is (N, r) even where the weight is (K, N)."""
    order = linear.orders[adapter.layer] if linear.orders else None
    return None if order is None else order._replace(transposed=False)
