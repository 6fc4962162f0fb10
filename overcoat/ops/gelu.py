"""`gelu_linear`: the second half of an MLP without a gate, h = gelu(u), then the second projection and the residual.

Keeps u, the first projection, in 8-bit groups (I / 2H U), and not h: the backward rebuilds it from the codes in the
pass that computes u's gradient (kernels/gelu.py). `approximate`, "none" or "tanh", is that of PyTorch's `gelu`.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overcoat.formats import Quantized
from overcoat.kernels.gelu import (
    gelu_backward,
    gelu_backward_amax,
    gelu_backward_quantize,
    gelu_encode,
    gelu_quantize,
)
from overcoat.kernels.gelu_blockwise import gelu_block_backward, gelu_block_backward_quantize, gelu_block_quantize
from overcoat.kernels.groups import group_encode
from overcoat.kernels.quantize import amax
from overcoat.memory import keep
from overcoat.ops.blockwise import forward_product
from overcoat.ops.mlp import MlpKept
from overcoat.ops.products import Gradient, LinearGrads, dgrad, product, quantize_gradient, wgrad
from overcoat.recipe import Recipe


def gelu_linear_forward(
    u: Tensor, weight: Tensor, bias: Optional[Tensor], residual: Tensor, recipe: Recipe, approximate: str
) -> tuple[Tensor, MlpKept]:
    """residual + gelu(u) W^T + bias: u (T, I) -> (T, N)."""
    code, group_size = recipe.kept_format, recipe.group_size
    if recipe.linear_scaling == "block":
        h8, h_scale, codes, group_amax = gelu_block_quantize(u, approximate, code, group_size)
        y = forward_product(Quantized(h8, h_scale), [weight], bias, residual.dtype)
        return residual + y, MlpKept(codes, group_amax, None, None)
    codes, group_amax, row_amax = gelu_encode(u, approximate, code, group_size)
    h8, h_scale = gelu_quantize(u, amax(row_amax), approximate)
    y, w_amax = product(h8, h_scale, [weight], bias, residual.dtype, None, residual)
    return y, MlpKept(codes, group_amax, h_scale, w_amax)


def gelu_linear_again(u: Tensor, h_scale: Optional[Tensor], w_amax: Optional[Tensor], recipe: Recipe) -> MlpKept:
    """What `gelu_linear_forward` keeps, without its result."""
    codes, group_amax = group_encode(u, None, recipe.kept_format, recipe.group_size)
    return MlpKept(codes, group_amax, h_scale, w_amax)


def _input_gradient(dh: Tensor, kept: MlpKept, recipe: Recipe, approximate: str) -> tuple[Tensor, Quantized]:
    """du (T, I) in 16 bits, and h as transposed operand."""
    codes, group_amax, scale = kept.codes, kept.group_amax, kept.h_scale
    how = approximate, recipe.kept_format, recipe.group_size
    if scale is None:
        du, h_t, h_scale = gelu_block_backward(dh, codes, group_amax, *how)
        return du, Quantized(h_t, h_scale)
    du, h_t = gelu_backward(dh, codes, group_amax, scale, *how)
    return du, Quantized(h_t, scale)


def _quantized_gradient(
    dh: Tensor, kept: MlpKept, recipe: Recipe, approximate: str, has_bias: bool
) -> tuple[Gradient, Quantized]:
    """du in both FP8 layouts, with its sum over the tokens if `has_bias`, and h as transposed operand."""
    codes, group_amax, scale = kept.codes, kept.group_amax, kept.h_scale
    fmt, how = recipe.grad_format, (approximate, recipe.kept_format, recipe.group_size)
    if scale is None:
        data, d_scale, data_t, d_scale_t, h_t, h_scale, sums = gelu_block_backward_quantize(
            dh, codes, group_amax, fmt, has_bias, *how
        )
        d = Gradient(data, data_t, d_scale, sums if has_bias else None, dh.dtype, d_scale_t)
        return d, Quantized(h_t, h_scale)
    top = gelu_backward_amax(dh, codes, group_amax, *how)
    data, data_t, d_scale, sums, h_t = gelu_backward_quantize(dh, codes, group_amax, scale, top, fmt, has_bias, *how)
    return Gradient(data, data_t, d_scale, sums if has_bias else None, dh.dtype), Quantized(h_t, scale)


def gelu_linear_backward(
    dy: Tensor,
    kept: MlpKept,
    weight: Tensor,
    bias: Optional[Tensor],
    recipe: Recipe,
    approximate: str,
    quantized: bool = False,
    has_bias: bool = False,
    want_weight: bool = True,
) -> tuple[Tensor | Gradient, LinearGrads]:
    """Gradients of u (T, I) and of the second projection; the residual's gradient is dy itself.

    With `quantized` that of u goes straight into both FP8 layouts and never exists in 16 bits; `has_bias`: with its
    sum over the tokens, for the bias of the first projection.
    """
    d = quantize_gradient(dy, [bias], recipe)
    dh = dgrad(d, [weight], kept.w_amax)
    d = d._replace(data=None)
    du: Tensor | Gradient
    if quantized:
        du, h_t = _quantized_gradient(dh, kept, recipe, approximate, has_bias)
    else:
        du, h_t = _input_gradient(dh, kept, recipe, approximate)
    del dh  # I / H U, which the weight's gradient can use
    dweight = wgrad(d, h_t, weight.dtype) if want_weight else None
    dbias = None if bias is None or d.sums is None else d.sums.to(bias.dtype)
    return du, LinearGrads(None, (dweight,), (dbias,))


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        residual: Tensor,
        recipe: Recipe,
        approximate: str,
    ) -> Tensor:
        y, kept = gelu_linear_forward(u, weight, bias, residual, recipe, approximate)
        ctx.recipe, ctx.approximate = recipe, approximate
        keep(ctx, "gelu_linear", **kept._asdict(), weight=weight, bias=bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        saved = ctx.saved_tensors
        weight, bias = saved[4:]
        du, grads = gelu_linear_backward(dy, MlpKept(*saved[:4]), weight, bias, ctx.recipe, ctx.approximate)
        assert isinstance(du, Tensor)
        return du, grads.dweights[0], grads.dbiases[0], dy, None, None


def gelu_linear(
    u: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Tensor,
    recipe: Recipe,
    approximate: str = "none",
) -> Tensor:
    """residual + gelu(u) W^T + bias, in FP8.

    Args:
        u: (T, I), the first projection with its bias; weight: (N, I); bias: (N,) or None; residual: (T, N).
        approximate: "none" (erf: Hugging Face's "gelu") or "tanh" ("gelu_pytorch_tanh", "gelu_new").

    Returns:
        (T, N) in the residual's dtype. Keeps u at 8 bits.

    Raises:
        ValueError: another `approximate`.
    """
    return _GeluLinear.apply(u, weight, bias, residual, recipe, approximate)
