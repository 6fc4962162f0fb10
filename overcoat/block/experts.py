"""Experts in FP8: of each token's row, the sum over its experts of weight * down(f(gate) * up).

    z   = x W1[e]^T + b1        x in E4M3, once for each token; the pairs of tokens and experts are its rows, gathered
    h   = f(gate) * up          z in 8-bit groups is what the backward needs; h is computed again
    y   = h W2[e]^T + b2
    out = sum over k of w y     w: the router's weights

    g   = dout W2[e]            dout in E4M3 with a scale for each token: in E5M2 dw would lose 2 dB
    dw  = g . h + dout . b2     so y is not saved
    dz  = f'(z) (w g)           in FP8 as it is written
    dW2 = (w dout)^T h,  dW1 = dz^T x,  dx = sum over k of dz W1[e]

A router's choice stays the model's: experts get the indices and the weights that it computes. One scale for each tensor
of activations and of other gradients, and for each expert's weight, whatever `Recipe.linear_scaling` is.

Saved for a token: H bytes of x (shared with all that reads it), k F I of codes, and the routing.

Legend: T tokens, k experts per token, E experts, S slots (kernels/grouped.py), H hidden size, I intermediate size, F =
2 with a gate, else 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.block.linear import FAST_WGRAD_TOKENS, GatheredWeight
from overcoat.block.linear_layer import Operand, SharedInput, quantized_input
from overcoat.block.reference import ACTIVATIONS
from overcoat.kernels.activation import (
    activation_backward,
    activation_encode,
    activation_gradient_bound,
    activation_quantize,
)
from overcoat.kernels.experts import (
    combine,
    expert_amax,
    expert_gradient,
    gather_t,
    limit_,
    mask_,
    quantize_experts,
    transpose_experts,
)
from overcoat.kernels.grouped import Routing, grouped_gemm, grouped_wgrad, route, tile_rows
from overcoat.kernels.op import check_no_transforms, first_order
from overcoat.kernels.quantize import amax, quantize_both, quantize_rows
from overcoat.memory import keep, release_saved
from overcoat.recipe import Recipe


class Experts(NamedTuple):
    """Constants of experts, and how their weights lie.

    activation: f's name in kernels/activation_functions.py. gated: h = f(gate) * up, both in one weight; False:
    h = f(z). transposed: weights are (E, in, out) (gpt-oss). interleaved: rows of gate and up alternate (gpt-oss).
    limit: gate is at most this, and up within it, before f (gpt-oss); 0: no limit. shift: added to up after that.
    """

    activation: str
    gated: bool = True
    transposed: bool = False
    interleaved: bool = False
    limit: float = 0.0
    shift: float = 0.0

    def first(self, w: Tensor) -> Tensor:
        """Return the first weight as (E, F I, H), or its bias as (E, F I): gate, then up."""
        w = w.transpose(1, 2) if self.transposed and w.dim() == 3 else w
        return w.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if self.interleaved else w

    def as_parameter(self, gradient: Tensor) -> Tensor:
        """Return a gradient of what `first` returned in the parameter's order, (E, F I, ...)."""
        return gradient.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if self.interleaved else gradient

    def second(self, w: Tensor) -> Tensor:
        """Return the second weight as (E, H, I)."""
        return w.transpose(1, 2) if self.transposed else w

    def operand(self, w: Tensor, amax: Optional[Tensor], is_first: bool, for_dgrad: bool) -> tuple[Tensor, Tensor]:
        """Return what `first` or `second` returns as E4M3 operand of the forward, or transposed for dgrad; scales.
        amax: from `_amax`."""
        w = _held(w)
        if amax is None:
            return transpose_experts(w.held) if for_dgrad else w.held, w.scale  # type: ignore[attr-defined]
        if self.transposed:
            return quantize_experts(w, amax, not for_dgrad, is_first and self.interleaved)
        return quantize_experts(self.first(w) if is_first else w, amax, for_dgrad)


class Weights(NamedTuple):
    """Parameters of all experts: w1 (E, F I, H), w2 (E, H, I), or with `Experts.transposed` (E, in, out); biases b1 (E,
    F I) and b2 (E, H), or None."""

    w1: Tensor
    w2: Tensor
    b1: Optional[Tensor] = None
    b2: Optional[Tensor] = None


def _held(w: Tensor) -> Tensor:
    """Return a weight that FSDP2 has gathered in 16 bits as a plain tensor; any other as it is."""
    return w.held if isinstance(w, GatheredWeight) and w.scale is None else w


def _amax(w: Tensor) -> Optional[Tensor]:
    """Return max |w| of each expert, (E,) FP32; None if the weights were gathered in FP8, with their scales."""
    w = _held(w)
    return None if isinstance(w, GatheredWeight) else expert_amax(w)


def plain_experts(x: Tensor, index: Tensor, weights: Tensor, parameters: Weights, how: Experts) -> Tensor:
    """Return what `experts_layer` does in plain PyTorch, in x's dtype: its definition."""
    w1, w2, b1 = how.first(parameters.w1), how.second(parameters.w2), parameters.b1
    out = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        z = x @ w1[e].t()  # (T, F I)
        z = z if b1 is None else z + how.first(b1)[e]
        gate, *up = z.chunk(1 + how.gated, 1)
        gate = gate.clamp(max=how.limit) if how.limit else gate
        h = ACTIVATIONS[how.activation](gate)  # (T, I)
        for part in up:
            h = h * ((part.clamp(-how.limit, how.limit) if how.limit else part) + how.shift)
        y = h @ w2[e].t()  # (T, H)
        y = y if parameters.b2 is None else y + parameters.b2[e]
        out = out + y * (weights * (index == e)).sum(1, keepdim=True)
    return out


def _dense(index: Tensor, values: Tensor, experts: int) -> Tensor:
    """Return values (T, k) as (T, E): 0 for experts that a token does not visit."""
    return values.new_zeros(values.shape[0], experts).scatter_add(1, index, values)


class _ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, b1: Optional[Tensor], b2: Optional[Tensor], weights: Tensor,
        index: Tensor, operand: Operand, dtype: torch.dtype, how: Experts, recipe: Recipe,
    ) -> Tensor:  # fmt: skip
        experts = w1.shape[0]
        routing = Routing(*route(index, experts, tile_rows(index.numel(), experts)))
        w1_amax, w2_amax, wide = _amax(w1), _amax(w2), weights.float()
        w8, scale = how.operand(w1, w1_amax, True, False)
        z = grouped_gemm(operand.codes, routing.tokens, w8, routing.experts, operand.scale, scale, dtype)
        clipped = None
        if b1 is not None or how.limit or how.shift:
            bias = None if b1 is None else how.first(b1)
            clipped = limit_(z, bias, routing.experts, routing.tokens, how.gated, how.limit, how.shift)
        codes, group_amax, top = activation_encode(z, how.activation, how.gated, recipe.kept_format, recipe.group_size)
        h8, h_scale = activation_quantize(z, top, how.activation, how.gated)
        del z, w8
        w8, scale = how.operand(w2, w2_amax, False, False)
        y = grouped_gemm(h8, None, w8, routing.experts, h_scale, scale, dtype)
        out = combine(y, routing.slots, wide)
        if b2 is not None:
            out = (out.float() + _dense(index, wide, experts) @ b2.float()).to(out.dtype)
        wants_w1 = w1.requires_grad
        keep(
            ctx, "experts", x=operand.codes if wants_w1 else None, x_scale=operand.scale if wants_w1 else None,
            codes=codes, group_amax=group_amax, h_scale=h_scale, clipped=clipped, weights=weights, index=index,
            slots=routing.slots, tokens=routing.tokens, experts=routing.experts, bounds=routing.bounds,
            w1_amax=w1_amax, w2_amax=w2_amax, w1=w1, w2=w2, b1=b1, b2=b2,
        )  # fmt: skip
        ctx.how, ctx.recipe = how, recipe
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Optional[Tensor], ...]:
        x8, x_scale, codes, group_amax, h_scale, clipped, weights, index, *rest = ctx.saved_tensors
        routing, (w1_amax, w2_amax, w1, w2, b1, b2) = Routing(*rest[:4]), rest[4:]
        release_saved(ctx)
        how, recipe, (wants_x, wants_w1, wants_w2, wants_b1, wants_b2, wants_weights) = (
            ctx.how, ctx.recipe, ctx.needs_input_grad[:6]
        )  # fmt: skip
        fmt, kept, dtype = recipe.grad_format, (how.activation, recipe.kept_format, recipe.group_size), dout.dtype
        dout, wide = dout.contiguous(), weights.float()
        of_slot = wide.new_zeros(routing.tokens.shape[0]).index_put((routing.slots.flatten().long(),), wide.flatten())
        d8, d_scale = quantize_rows(dout, "e4m3")
        w_t, w_scale = how.operand(w2, w2_amax, False, True)
        g = grouped_gemm(d8, routing.tokens, w_t, routing.experts, d_scale, w_scale, dtype)
        del d8, w_t
        dh, sums = expert_gradient(g, codes, group_amax, of_slot, *kept)
        del g
        dweights = db1 = db2 = dw1 = dw2 = dx = None
        if wants_weights:
            dweights = sums[routing.slots.long()]
            if b2 is not None:
                dweights = dweights + (dout.float() @ b2.float().t()).gather(1, index)
            dweights = dweights.to(weights.dtype)
        if wants_b2:
            db2 = (_dense(index, wide, w1.shape[0]).t() @ dout.float()).to(b2.dtype)
        dz, dz_t, dz_scale, tile_sums, h_t = _gradient(
            dh, codes, group_amax, h_scale, clipped, routing, wants_b1, how, recipe
        )
        del dh, codes
        if tile_sums is not None:
            owner = F.one_hot(routing.experts.long(), w1.shape[0] + 1)[:, :-1]
            db1 = how.as_parameter(owner.t().float() @ tile_sums).to(b1.dtype)
        if wants_w2:
            d_t, scale = gather_t(dout, routing.tokens, of_slot, amax(dout) * of_slot.abs().amax(), fmt)
            dw2 = _weight_gradient(d_t, h_t, routing, scale * h_scale, w2.dtype, how.transposed)
            del d_t
        del h_t
        if wants_w1:
            x_t, _ = gather_t(x8, routing.tokens, None, None, "e4m3")
            rows = how.as_parameter(dz_t.view(torch.uint8)[None])[0].view(dz_t.dtype)
            dw1 = _weight_gradient(rows, x_t, routing, dz_scale * x_scale, w1.dtype, how.transposed)
            del x_t, rows
        del dz_t
        if wants_x:
            w_t, w_scale = how.operand(w1, w1_amax, True, True)
            of_pairs = grouped_gemm(dz, None, w_t, routing.experts, dz_scale, w_scale, dtype)
            dx = combine(of_pairs, routing.slots, None)
        return dx, dw1, dw2, db1, db2, dweights, None, None, None, None, None


def _weight_gradient(
    a: Tensor, b: Tensor, routing: Routing, scale: Tensor, dtype: torch.dtype, transposed: bool
) -> Tensor:
    a, b = (b, a) if transposed else (a, b)
    # A mean: experts that more tokens visit have a larger error of accumulation, far below FP8's.
    fast = routing.tokens.shape[0] <= FAST_WGRAD_TOKENS * (routing.bounds.shape[0] - 1)
    return grouped_wgrad(a, b, routing.bounds, routing.rows, scale, dtype, fast)


def _gradient(
    dh: Tensor, codes: Tensor, group_amax: Tensor, h_scale: Tensor, clipped: Optional[Tensor], routing: Routing,
    wants_sums: bool, how: Experts, recipe: Recipe,
) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor], Tensor]:  # fmt: skip
    """Return dz in FP8 in both layouts, (S, F I) and (F I, S), its scale, its sums over each tile (FP32, if wanted),
    and h as transposed operand (I, S)."""
    fmt, kept = recipe.grad_format, (how.activation, recipe.kept_format, recipe.group_size)
    if not how.limit and not wants_sums:
        bound = activation_gradient_bound(dh, group_amax, how.activation, recipe.group_size)
        dz, dz_t, scale, _, h_t = activation_backward(dh, codes, group_amax, h_scale, bound, fmt, False, *kept)
        return dz, dz_t, scale, None, h_t
    wide, h_t = activation_backward(dh, codes, group_amax, h_scale, None, None, False, *kept)
    if how.limit:
        mask_(wide, clipped)
    sums = wide.unflatten(0, (-1, routing.rows)).sum(1, dtype=torch.float32) if wants_sums else None
    return *quantize_both(wide, amax(wide), fmt), sums, h_t


def experts_layer(
    x: Tensor, index: Tensor, weights: Tensor, parameters: Weights, how: Experts, recipe: Recipe,
    shared: Optional[SharedInput] = None,
) -> Tensor:  # fmt: skip
    """Return the experts' result (T, H) of x (T, H) in FP8, in x's dtype; under autocast computed in autocast's.

    Args:
        index: (T, k) int64, each token's experts, from 0 to E - 1. weights: (T, k), the router's.
        shared: of all layers that may read the same x.
    """
    check_no_transforms()
    dtype = x.dtype
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    operand = quantized_input(x, shared, recipe, parameters.w1.requires_grad)
    result: Tensor = _ExpertsFunction.apply(x, *parameters, weights, index, operand, dtype, how, recipe)
    return result.to(x.dtype)
