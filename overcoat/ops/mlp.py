"""`swiglu_linear`: the second half of a gated MLP, h = silu(gate) * up, then the down projection and the residual.

Keeps gate and up in 8-bit groups (I / H U together), and neither silu(gate) nor h: the backward rebuilds h from the
codes in the pass that computes the gradients of gate and up (kernels/swiglu.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overcoat.formats import Quantized
from overcoat.kernels.blockwise_fused import (
    swiglu_block_backward,
    swiglu_block_backward_quantize,
    swiglu_block_quantize,
)
from overcoat.kernels.swiglu import (
    swiglu_backward,
    swiglu_backward_amax,
    swiglu_backward_quantize,
    swiglu_encode,
    swiglu_quantize,
)
from overcoat.memory import keep
from overcoat.ops.blockwise import forward_product, whole_blocks
from overcoat.ops.products import Gradient, LinearGrads, dgrad, product, quantize_gradient, wgrad
from overcoat.recipe import Recipe


class MlpKept(NamedTuple):
    """What `swiglu_linear` (`gelu_linear`) keeps: gate and up (u) in 8-bit groups, and two scales (none per block)."""

    codes: Tensor
    group_amax: Tensor
    h_scale: Optional[Tensor]
    w_amax: Optional[Tensor]


def swiglu_linear_forward(
    gate_up: Tensor, weight: Tensor, bias: Optional[Tensor], residual: Tensor, recipe: Recipe
) -> tuple[Tensor, MlpKept]:
    """residual + (silu(gate) * up) W^T + bias: gate_up (T, 2I) -> (T, N)."""
    if recipe.linear_scaling == "block":
        h8, h_scale, codes, group_amax = swiglu_block_quantize(gate_up, recipe.kept_format, recipe.group_size)
        y = forward_product(Quantized(h8, h_scale), [weight], bias, residual.dtype)
        return residual + y, MlpKept(codes, group_amax, None, None)
    codes, group_amax, h_amax = swiglu_encode(gate_up, recipe.kept_format, recipe.group_size)
    h8, h_scale = swiglu_quantize(gate_up, h_amax)
    y, w_amax = product(h8, h_scale, [weight], bias, residual.dtype, None, residual)
    return y, MlpKept(codes, group_amax, h_scale, w_amax)


def swiglu_linear_again(
    gate_up: Tensor, h_scale: Optional[Tensor], w_amax: Optional[Tensor], recipe: Recipe
) -> MlpKept:
    """What `swiglu_linear_forward` keeps, without its result: a recomputation needs no product (5% of a block)."""
    codes, group_amax, _ = swiglu_encode(gate_up, recipe.kept_format, recipe.group_size)
    return MlpKept(codes, group_amax, h_scale, w_amax)


def _gate_up_gradient(
    dh: Tensor, kept: MlpKept, recipe: Recipe, quantized: bool
) -> tuple[Tensor | Gradient, Quantized]:
    """Gradient of gate_up, `quantized` in both FP8 layouts or in 16 bits, and h as transposed operand."""
    fmt, code, group_size = recipe.grad_format, recipe.kept_format, recipe.group_size
    codes, group_amax, scale = kept.codes, kept.group_amax, kept.h_scale
    if scale is None:
        if quantized and whole_blocks(dh.shape[1]):
            data, d_scale, data_t, d_scale_t, h_t, h_scale = swiglu_block_backward_quantize(
                dh, codes, group_amax, fmt, code, group_size
            )
            return Gradient(data, data_t, d_scale, None, dh.dtype, d_scale_t), Quantized(h_t, h_scale)
        dgate_up, h_t, h_scale = swiglu_block_backward(dh, codes, group_amax, code, group_size)
        return dgate_up, Quantized(h_t, h_scale)
    if quantized:
        top = swiglu_backward_amax(dh, codes, group_amax, code, group_size)
        data, data_t, d_scale, h_t = swiglu_backward_quantize(dh, codes, group_amax, scale, top, fmt, code, group_size)
        return Gradient(data, data_t, d_scale, None, dh.dtype), Quantized(h_t, scale)
    dgate_up, h_t = swiglu_backward(dh, codes, group_amax, scale, code, group_size)
    return dgate_up, Quantized(h_t, scale)


def swiglu_linear_backward(
    dy: Tensor,
    kept: MlpKept,
    weight: Tensor,
    bias: Optional[Tensor],
    recipe: Recipe,
    quantized: bool = False,
    want_weight: bool = True,
) -> tuple[Tensor | Gradient, LinearGrads]:
    """Gradients of gate_up (T, 2I) and of the down projection; the residual's gradient is dy itself.

    With `quantized` the gradient of gate_up goes straight into both FP8 layouts and never exists in 16 bits (unless
    a block of it would span gate and up).
    """
    d = quantize_gradient(dy, [bias], recipe)
    dh = dgrad(d, [weight], kept.w_amax)
    d = d._replace(data=None)
    dgate_up, h_t = _gate_up_gradient(dh, kept, recipe, quantized)
    del dh  # I / H U, which the weight's gradient can use
    dweight = wgrad(d, h_t, weight.dtype) if want_weight else None
    dbias = None if bias is None or d.sums is None else d.sums.to(bias.dtype)
    return dgate_up, LinearGrads(None, (dweight,), (dbias,))


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weight: Tensor, bias: Optional[Tensor], residual: Tensor, recipe: Recipe
    ) -> Tensor:
        y, kept = swiglu_linear_forward(gate_up, weight, bias, residual, recipe)
        ctx.recipe = recipe
        keep(ctx, "swiglu_linear", **kept._asdict(), weight=weight, bias=bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        saved = ctx.saved_tensors
        weight, bias = saved[4:]
        dgate_up, grads = swiglu_linear_backward(dy, MlpKept(*saved[:4]), weight, bias, ctx.recipe)
        assert isinstance(dgate_up, Tensor)
        return dgate_up, grads.dweights[0], grads.dbiases[0], dy, None


def swiglu_linear(gate_up: Tensor, weight: Tensor, bias: Optional[Tensor], residual: Tensor, recipe: Recipe) -> Tensor:
    """residual + (silu(gate) * up) W^T + bias, in FP8.

    Args:
        gate_up: (T, 2I), gate in the first I columns; weight: (N, I); bias: (N,) or None; residual: (T, N).

    Returns:
        (T, N) in the residual's dtype. Keeps gate and up at 8 bits each.
    """
    return _SwigluLinear.apply(gate_up, weight, bias, residual, recipe)
