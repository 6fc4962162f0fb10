"""Norms before and after a branch's linear layers, and the tensors they save.

Before: the norm's output is written as the FP8 operand of one GEMM over the stacked layers that read it, and never
exists in 16 bits. After: the residual plus the norm of the output layer's result, in one pass. Both save the normalised
input in 8-bit groups (0.5 U) and rstd: enough for the norm's backward and to recompute its output.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.block.linear import Gradient, InputSaved, LinearGrads, linear_backward, linear_block_gemm, linear_gemm
from overcoat.block.spec import Linear, Norm
from overcoat.formats import Quantized
from overcoat.kernels.blockwise import block_requantize_t, requantize_t
from overcoat.kernels.groups import group_encode
from overcoat.kernels.norm import (
    add_norm_encode,
    norm_backward,
    norm_block_quantize,
    norm_quantize,
    norm_stats,
    rms_norm,
)
from overcoat.kernels.op import first_order
from overcoat.memory import keep
from overcoat.recipe import Recipe


class NormLinearSaved(NamedTuple):
    """Tensors saved by a norm and its linear layers: the normalized input in 8-bit groups (0.5 U), rstd, two scales
    (None with block scales)."""

    codes: Tensor
    group_amax: Tensor
    rstd: Tensor
    scale: Optional[Tensor]
    w_amax: Optional[Tensor]


def norm_linear_forward(
    x: Tensor, y: Optional[Tensor], norm: Norm, in_proj: Linear, recipe: Recipe, w_amax: Optional[Tensor] = None
) -> tuple[Tensor, Tensor, NormLinearSaved]:
    """Return x (T, H), or x + y if y is given; its norm times the stacked weights (T, sum N); and the saved tensors.

    w_amax: the weights' maximum (0-d) if already found.
    """
    code, (first, residual) = (recipe.kept_format, recipe.group_size), (x, None) if y is None else (y, x)
    if recipe.linear_scaling == "block":
        y8, y_scale, codes, group_amax, rstd, *total = norm_block_quantize(first, residual, *norm, *code)
        x = x if y is None else total[0]
        z = linear_block_gemm(Quantized(y8, y_scale), in_proj, x.dtype)
        return x, z, NormLinearSaved(codes, group_amax, rstd, None, None)
    rstd, amax, *rest = norm_stats(first, residual, *norm)
    rest, x = (rest, x) if y is None else (rest[:-1], rest[-1])
    y8, y_scale, codes, group_amax = norm_quantize(
        x, rest[0] if rest else None, rstd, norm.weight, norm.bias, amax, *code
    )
    z, w_amax = linear_gemm(y8, y_scale, in_proj, x.dtype, w_amax)
    return x, z, NormLinearSaved(codes, group_amax, rstd, y_scale, w_amax)


def in_proj_backward(
    dy: Tensor | Gradient,
    saved: NormLinearSaved | InputSaved,
    norm: Optional[Norm],
    in_proj: Linear,
    recipe: Recipe,
    want_weights: bool,
) -> LinearGrads:
    """Return the gradients of the linear layers, and of their input: the norm's output, or without a norm the stream.

    For the weights' gradient the input is rebuilt as transposed E4M3 operand, with the forward's scale if saved.
    """
    x_t = None
    if want_weights:
        weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
        inputs, code = (saved.codes, saved.group_amax, weight, bias), (recipe.kept_format, recipe.group_size)
        if saved.scale is None:
            x_t = Quantized(*block_requantize_t(*inputs, *code))
        else:
            x_t = Quantized(requantize_t(*inputs, saved.scale, *code), saved.scale)
    return linear_backward(dy, x_t, in_proj, saved.w_amax, recipe)


class NormSaved(NamedTuple):
    """Tensors saved by a norm after the output layer: its normalized input in 8-bit groups (0.5 U), rstd."""

    codes: Tensor
    group_amax: Tensor
    rstd: Tensor


def norm_after_forward(y: Tensor, residual: Tensor, norm: Norm, recipe: Recipe) -> tuple[Tensor, NormSaved]:
    """Return residual + norm(y), both (T, H), and the saved tensors."""
    x, *saved = add_norm_encode(y, residual, *norm, recipe.kept_format, recipe.group_size)
    return x, NormSaved(*saved)


def input_gradient(
    dy: Tensor, dresidual: Optional[Tensor], saved: NormLinearSaved | NormSaved, norm: Norm, recipe: Recipe
) -> tuple[Tensor, Norm, Tensor]:
    """Return the gradient dx of a norm's input, the gradients of its parameters, and max |dx| for the next GEMM.

    dy: the output's gradient (T, H); dresidual: (T, H), added to dx if given.
    """
    dx, dweight, dbias, dx_amax = norm_backward(
        dy, saved.codes, saved.group_amax, saved.rstd, norm.weight, dresidual, norm.centered, norm.bias is not None,
        recipe.kept_format, recipe.group_size,
    )  # fmt: skip
    gradients = norm._replace(
        weight=None if norm.weight is None else dweight, bias=None if norm.bias is None else dbias.to(norm.bias.dtype)
    )
    return dx, gradients, dx_amax


class _Norm(torch.autograd.Function):
    """A norm whose result no FP8 GEMM reads; saves its normalised input in 8-bit groups (0.5 U), and rstd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, recipe: Recipe) -> Tensor:
        y, rstd = rms_norm(x, weight.to(x.dtype), eps)
        codes, group_amax = group_encode(x, recipe.kept_format, recipe.group_size)
        # Codes are relative to their group's maximum, so scaling the maxima by rstd makes them codes of x * rstd.
        group_amax = (group_amax * rstd[:, None]).to(group_amax.dtype)
        keep(ctx, "norm", codes=codes, group_amax=group_amax, rstd=rstd, weight=weight)
        ctx.recipe = recipe
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        *saved, weight = ctx.saved_tensors
        recipe = ctx.recipe
        dx, dweight, _, _ = norm_backward(dy, *saved, weight, None, False, False, recipe.kept_format, recipe.group_size)
        return dx, dweight, None, None


def norm_forward(x: Tensor, norm: Norm, recipe: Recipe) -> Tensor:
    """Return the RMSNorm of x (..., H) in x's dtype, for a norm outside FP8 blocks."""
    assert norm.weight is not None
    return _Norm.apply(x.flatten(0, -2), norm.weight, norm.eps, recipe).view(x.shape)
