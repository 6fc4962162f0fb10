"""`swiglu_linear`: the second half of a gated MLP, h = silu(gate) * up, then the down projection and the residual.

Keeps gate and up in 8-bit groups (I / H U together), and neither silu(gate) nor h: the backward rebuilds h from the
codes in the pass that computes the gradients of gate and up (kernels/swiglu.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overcoat.kernels.gemm import gemm
from overcoat.kernels.quantize import amax, stack_weights
from overcoat.kernels.swiglu import (
    swiglu_backward,
    swiglu_backward_amax,
    swiglu_backward_quantize,
    swiglu_encode,
    swiglu_quantize,
)
from overcoat.memory import keep
from overcoat.ops.linear import FAST_DGRAD, Gradient, LinearGrads, product, quantize_gradient
from overcoat.recipe import Recipe


class SwigluLinearKept(NamedTuple):
    """What `swiglu_linear` keeps: gate and up in 8-bit groups, and two scales."""

    codes: Tensor
    group_amax: Tensor
    h_scale: Tensor
    w_amax: Tensor


def swiglu_linear_forward(
    gate_up: Tensor, weight: Tensor, bias: Optional[Tensor], residual: Tensor, recipe: Recipe
) -> tuple[Tensor, SwigluLinearKept]:
    """residual + (silu(gate) * up) W^T + bias: gate_up (T, 2I) -> (T, N)."""
    codes, group_amax, row_amax = swiglu_encode(gate_up, recipe.kept_format, recipe.group_size)
    h8, h_scale = swiglu_quantize(gate_up, amax(row_amax))
    y, w_amax = product(h8, h_scale, [weight], bias, residual.dtype)
    return residual + y, SwigluLinearKept(codes, group_amax, h_scale, w_amax)


def swiglu_linear_backward(
    dy: Tensor,
    kept: SwigluLinearKept,
    weight: Tensor,
    bias: Optional[Tensor],
    recipe: Recipe,
    quantized: bool = False,
    want_weight: bool = True,
) -> tuple[Tensor | Gradient, LinearGrads]:
    """Gradients of gate_up (T, 2I) and of the down projection; the residual's gradient is dy itself.

    With `quantized` the gradient of gate_up goes straight into both FP8 layouts and never exists in 16 bits.
    """
    d = quantize_gradient(dy, [bias], recipe)
    w_t, w_scale = stack_weights([weight], kept.w_amax, True)
    dh = gemm(d.data, w_t, d.scale, w_scale, None, d.dtype, FAST_DGRAD)
    code, group_size = recipe.kept_format, recipe.group_size
    dgate_up: Tensor | Gradient
    if quantized:
        top, h_t = swiglu_backward_amax(dh, kept.codes, kept.group_amax, kept.h_scale, code, group_size)
        data, transposed, scale = swiglu_backward_quantize(
            dh, kept.codes, kept.group_amax, top, recipe.grad_format, code, group_size
        )
        dgate_up = Gradient(data, transposed, scale, None, d.dtype)
    else:
        dgate_up, h_t = swiglu_backward(dh, kept.codes, kept.group_amax, kept.h_scale, code, group_size)
    dweight = gemm(d.transposed, h_t, d.scale, kept.h_scale, None, weight.dtype, False) if want_weight else None
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
        dgate_up, grads = swiglu_linear_backward(dy, SwigluLinearKept(*saved[:4]), weight, bias, ctx.recipe)
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
