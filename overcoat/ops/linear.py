"""FP8 linear layers: after a norm (`norm_linear`) and into the residual stream (`linear_residual`).

Each op is a pair of pure functions, forward and backward, over the op catalogue, and a thin `autograd.Function` around
them: the Function says what autograd keeps, the pure functions let a checkpointed block (block.py) run them again.

The products are those of products.py. Weights that read the same input (q, k, v; gate, up) are one stacked operand of
one GEMM. Autograd keeps the parameters themselves, never their FP8 copies: those are made where they are used and freed
after (weights.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overcoat.formats import Quantized
from overcoat.kernels.blockwise import block_quantize, block_quantize_t, block_requantize_t
from overcoat.kernels.groups import requantize_t
from overcoat.kernels.norm import add_layernorm_stats, add_rmsnorm_stats, layernorm_stats, norm_quantize, rmsnorm_stats
from overcoat.kernels.norm_backward import norm_backward
from overcoat.kernels.norm_blockwise import add_norm_block_quantize, norm_block_quantize
from overcoat.kernels.quantize import amax, quantize, quantize_t
from overcoat.memory import keep
from overcoat.ops import blockwise
from overcoat.ops.products import Gradient, LinearGrads, product, product_backward, stack_biases
from overcoat.recipe import Recipe


class Norm(NamedTuple):
    """A norm's parameters. weight, bias: (H,) or None; centered: LayerNorm instead of RMSNorm."""

    weight: Optional[Tensor]
    bias: Optional[Tensor]
    eps: float
    centered: bool = False


# ---- norm, then linear layers that share its output -----------------------------------------------------------


class NormLinearKept(NamedTuple):
    """What `norm_linear` keeps: the normalised input in 8-bit groups (0.5 U), rstd, two scales (none per block)."""

    codes: Tensor
    group_amax: Tensor
    rstd: Tensor
    y_scale: Optional[Tensor]
    w_amax: Optional[Tensor]


def add_norm_linear_forward(
    y: Tensor,
    residual: Tensor,
    norm: Norm,
    weights: Sequence[Tensor],
    biases: Sequence[Optional[Tensor]],
    recipe: Recipe,
    w_amax: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, NormLinearKept]:
    """x = residual + y (T, H), and `norm_linear_forward` of x, in one pass less."""
    if recipe.linear_scaling == "block":
        x, *parts = add_norm_block_quantize(y, residual, *norm, recipe.kept_format, recipe.group_size)
        return x, *_norm_linear_blocks(parts, weights, biases, x.dtype)
    mean = None
    if norm.centered:
        x, mean, rstd, row_amax = add_layernorm_stats(y, residual, norm.weight, norm.bias, norm.eps)
    else:
        x, rstd, row_amax = add_rmsnorm_stats(y, residual, norm.weight, norm.eps)
    return x, *_norm_linear_forward(x, mean, rstd, row_amax, norm, weights, biases, recipe, w_amax)


def norm_linear_forward(
    x: Tensor,
    norm: Norm,
    weights: Sequence[Tensor],
    biases: Sequence[Optional[Tensor]],
    recipe: Recipe,
    w_amax: Optional[Tensor] = None,
) -> tuple[Tensor, NormLinearKept]:
    """Norm(x) times the stacked weights: x (T, H) -> (T, sum N); w_amax: the weights' maximum if known."""
    if recipe.linear_scaling == "block":
        parts = norm_block_quantize(x, *norm, recipe.kept_format, recipe.group_size)
        return _norm_linear_blocks(parts, weights, biases, x.dtype)
    mean = None
    if norm.centered:
        mean, rstd, row_amax = layernorm_stats(x, norm.weight, norm.bias, norm.eps)
    else:
        rstd, row_amax = rmsnorm_stats(x, norm.weight, norm.eps)
    return _norm_linear_forward(x, mean, rstd, row_amax, norm, weights, biases, recipe, w_amax)


def _norm_linear_forward(
    x: Tensor,
    mean: Optional[Tensor],
    rstd: Tensor,
    row_amax: Tensor,
    norm: Norm,
    weights: Sequence[Tensor],
    biases: Sequence[Optional[Tensor]],
    recipe: Recipe,
    w_amax: Optional[Tensor],
) -> tuple[Tensor, NormLinearKept]:
    y8, y_scale, codes, group_amax = norm_quantize(
        x, mean, rstd, norm.weight, norm.bias, amax(row_amax), recipe.kept_format, recipe.group_size
    )
    y, w_amax = product(y8, y_scale, weights, stack_biases(weights, biases), x.dtype, w_amax)
    return y, NormLinearKept(codes, group_amax, rstd, y_scale, w_amax)


def _norm_linear_blocks(
    parts: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Optional[Tensor]], dtype: torch.dtype
) -> tuple[Tensor, NormLinearKept]:
    """`norm_linear_forward` from the results of `norm_block_quantize`."""
    y8, y_scale, codes, group_amax, rstd = parts
    y = blockwise.forward_product(Quantized(y8, y_scale), weights, stack_biases(weights, biases), dtype)
    return y, NormLinearKept(codes, group_amax, rstd, None, None)


def _rebuild_norm_t(kept: NormLinearKept, norm: Norm, recipe: Recipe) -> Quantized:
    """The norm's output as transposed E4M3 operand, with the forward's scale if kept."""
    inputs, code = (kept.codes, kept.group_amax, norm.weight, norm.bias), (recipe.kept_format, recipe.group_size)
    if kept.y_scale is None:
        return Quantized(*block_requantize_t(*inputs, *code))
    return Quantized(requantize_t(*inputs, kept.y_scale, *code), kept.y_scale)


def normed_product_backward(
    dy: Tensor | Gradient,
    kept: NormLinearKept,
    norm: Norm,
    weights: Sequence[Tensor],
    biases: Sequence[Optional[Tensor]],
    recipe: Recipe,
    want_weights: bool = True,
) -> LinearGrads:
    """Gradients of the norm's output and of the linear layers."""
    x_t = _rebuild_norm_t(kept, norm, recipe) if want_weights else None
    return product_backward(dy, x_t, weights, biases, kept.w_amax, recipe)


def input_norm_backward(
    dy: Optional[Tensor], dresidual: Optional[Tensor], kept: NormLinearKept, norm: Norm, recipe: Recipe
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor], Tensor]:
    """Gradients of x (the residual's own added), norm weight and norm bias from dy, its output's; and max |dx|."""
    assert dy is not None
    dx, dweight, dbias, dx_amax = norm_backward(
        dy, kept.codes, kept.group_amax, kept.rstd, norm.weight, dresidual, norm.centered, norm.bias is not None,
        recipe.kept_format, recipe.group_size,
    )  # fmt: skip
    dnorm_bias = None if norm.bias is None else dbias.to(norm.bias.dtype)
    return dx, None if norm.weight is None else dweight, dnorm_bias, dx_amax


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Optional[Tensor],
        norm_bias: Optional[Tensor],
        eps: float,
        centered: bool,
        recipe: Recipe,
        *parameters: Optional[Tensor],
    ) -> tuple[Tensor, Tensor]:
        count = len(parameters) // 2
        norm = Norm(norm_weight, norm_bias, eps, centered)
        y, kept = norm_linear_forward(x, norm, parameters[:count], parameters[count:], recipe)  # type: ignore[arg-type]
        ctx.eps, ctx.centered, ctx.recipe, ctx.count = eps, centered, recipe, count
        layers = {f"parameter{i}": p for i, p in enumerate(parameters)}
        keep(ctx, "norm_linear", **kept._asdict(), norm_weight=norm_weight, norm_bias=norm_bias, **layers)
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Optional[Tensor], dresidual: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        if dy is None:
            return (dresidual, *(None,) * (5 + 2 * ctx.count))
        saved = ctx.saved_tensors
        kept, (norm_weight, norm_bias), parameters = NormLinearKept(*saved[:5]), saved[5:7], saved[7:]
        weights, biases = parameters[: ctx.count], parameters[ctx.count :]
        norm = Norm(norm_weight, norm_bias, ctx.eps, ctx.centered)
        want_weights = any(ctx.needs_input_grad[6 : 6 + ctx.count])
        grads = normed_product_backward(dy, kept, norm, weights, biases, ctx.recipe, want_weights)
        dx, dnorm, dnorm_bias, _ = input_norm_backward(grads.dx, dresidual, kept, norm, ctx.recipe)
        return (dx, dnorm, dnorm_bias, None, None, None, *grads.dweights, *grads.dbiases)


def norm_linear(
    x: Tensor,
    norm: Norm,
    weights: Sequence[Tensor],
    biases: Sequence[Optional[Tensor]],
    recipe: Recipe,
) -> tuple[Tensor, Tensor]:
    """RMSNorm or LayerNorm, then one FP8 GEMM over several stacked linear layers.

    Args:
        x: (T, H), the residual stream, BF16 (or FP16, FP32).
        norm: weight and bias (H,) or None, eps, centered.
        weights: each (N_i, H); biases: each (N_i,) or None.
        recipe: formats of what is kept and of the gradients.

    Returns:
        (T, sum N_i), and x again for the residual connection: used there, x's gradient from both branches is summed
        inside the norm's backward instead of in a pass of its own.

    Keeps 0.5 U: the normalised input in 8-bit groups, and rstd.
    """
    return _NormLinear.apply(x, norm.weight, norm.bias, norm.eps, norm.centered, recipe, *weights, *biases)


# ---- linear layer into the residual stream ----------------------------------------------------------------------


class LinearResidualKept(NamedTuple):
    """What the output projection keeps: scales (none per block). Its input, attention's result, is computed again."""

    x_scale: Optional[Tensor]
    w_amax: Optional[Tensor]


def linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    dtype: torch.dtype,
    recipe: Recipe,
    x_amax: Optional[Tensor] = None,
    w_amax: Optional[Tensor] = None,
) -> tuple[Tensor, LinearResidualKept]:
    """x W^T + bias in `dtype`, x (T, K); x_amax, w_amax: max |x| and max |weight| if known."""
    if recipe.linear_scaling == "block":
        x_blocks = Quantized(*block_quantize(x, "e4m3"))
        return blockwise.forward_product(x_blocks, [weight], bias, dtype), LinearResidualKept(None, None)
    x8, x_scale = quantize(x, amax(x) if x_amax is None else x_amax, "e4m3")
    y, w_amax = product(x8, x_scale, [weight], bias, dtype, w_amax)
    return y, LinearResidualKept(x_scale, w_amax)


def rebuild_input_t(x: Tensor, scale: Optional[Tensor]) -> Quantized:
    """The input x in 16 bits as transposed E4M3 operand, with the forward's scale if kept."""
    if scale is None:
        return Quantized(*block_quantize_t(x, "e4m3"))
    return Quantized(quantize_t(x, scale, "e4m3"), scale)


class _LinearResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        residual: Tensor,
        recipe: Recipe,
    ) -> Tensor:
        y, kept = linear_forward(x, weight, bias, residual.dtype, recipe)
        ctx.recipe = recipe
        keep(ctx, "linear_residual", **kept._asdict(), x=x, weight=weight, bias=bias)
        return residual + y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        x_scale, w_amax, x, weight, bias = ctx.saved_tensors
        x_t = rebuild_input_t(x, x_scale) if ctx.needs_input_grad[1] else None
        grads = product_backward(dy, x_t, [weight], [bias], w_amax, ctx.recipe)
        return grads.dx, grads.dweights[0], grads.dbiases[0], dy, None


def linear_residual(x: Tensor, weight: Tensor, bias: Optional[Tensor], residual: Tensor, recipe: Recipe) -> Tensor:
    """residual + x W^T + bias, in FP8: x (T, K), weight (N, K), bias (N,) or None, residual (T, N).

    Returns:
        (T, N) in the residual's dtype. Keeps x.
    """
    return _LinearResidual.apply(x, weight, bias, residual, recipe)
