"""FP8 linear layers: after a norm (`norm_linear`) and into the residual stream (`linear_residual`).

Each op is a pair of pure functions, forward and backward, over the op catalogue, and a thin `autograd.Function` around
them: the Function says what autograd keeps, the pure functions let a checkpointed block (block.py) run them again.

The three products of a linear layer, with T tokens, K in, N out (kernels/quantize.py has the layouts):

    y  = x W^T          x, W in E4M3, one scale each, found just in time
    dx = dy W           dy in the recipe's gradient format (E5M2)
    dW = dy^T x         x rebuilt from its 8-bit kept form, with the forward's scale

Weights that read the same input (q, k, v; gate, up) are one stacked operand of one GEMM. Autograd keeps the parameters
themselves, never their FP8 copies: those are made where they are used and freed after.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overcoat.kernels.gemm import gemm
from overcoat.kernels.norm import layernorm_stats, norm_backward, norm_quantize, rmsnorm_stats
from overcoat.kernels.quantize import (
    Encoded,
    amax,
    quantize,
    quantize_both,
    quantize_t,
    requantize_t,
    stack_amax,
    stack_weights,
)
from overcoat.memory import keep
from overcoat.recipe import Recipe


class Norm(NamedTuple):
    """A norm's parameters. weight, bias: (H,) or None; centered: LayerNorm instead of RMSNorm."""

    weight: Optional[Tensor]
    bias: Optional[Tensor]
    eps: float
    centered: bool = False


# Fast accumulation of dgrad: 4% faster on the H200, its own error 50 to 59 dB below the result, FP8's 17 to 27. For
# wgrad it is no faster (docs/log-kernels.md).
FAST_DGRAD = True

# ---- the products, shared by every linear layer ---------------------------------------------------------------


def stack_biases(weights: Sequence[Tensor], biases: Sequence[Optional[Tensor]]) -> Optional[Tensor]:
    """One bias for the stacked weights, zeros where a layer has none; None if no layer has one."""
    if all(bias is None for bias in biases):
        return None
    if len(biases) == 1:
        return biases[0]
    return torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)])


def product(
    x8: Tensor, x_scale: Tensor, weights: Sequence[Tensor], bias: Optional[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """y = x W^T + bias of the stacked weights; also their common maximum, which the backward uses again."""
    w_amax = stack_amax(list(weights))
    w8, w_scale = stack_weights(list(weights), w_amax, False)
    return gemm(x8, w8, x_scale, w_scale, bias, dtype, True), w_amax


class LinearGrads(NamedTuple):
    """Gradients of a (stacked) linear layer: of its input, of each weight, of each bias (None where not needed)."""

    dx: Optional[Tensor]
    dweights: tuple[Optional[Tensor], ...]
    dbiases: tuple[Optional[Tensor], ...]


class Gradient(NamedTuple):
    """An output gradient (T, N) as FP8 operand of both products that read it, made once for both.

    data (T, N), for dgrad; transposed (N, P), for wgrad; their 0-d scale; sums (N,) FP32 over the tokens, for biases,
    or None; dtype of the activations.
    """

    data: Tensor
    transposed: Tensor
    scale: Tensor
    sums: Optional[Tensor]
    dtype: torch.dtype


def quantize_gradient(dy: Tensor, biases: Sequence[Optional[Tensor]], recipe: Recipe) -> Gradient:
    """dy (T, N) in the recipe's gradient format."""
    dy = dy.contiguous()
    data, transposed, scale = quantize_both(dy, amax(dy), recipe.grad_format)
    sums = None if all(bias is None for bias in biases) else dy.sum(0, dtype=torch.float32)
    return Gradient(data, transposed, scale, sums, dy.dtype)


def product_backward(
    dy: Tensor | Gradient,
    x_t: Optional[Tensor],
    x_scale: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Optional[Tensor]],
    w_amax: Tensor,
    recipe: Recipe,
) -> LinearGrads:
    """dgrad and wgrad from dy (T, N), quantized already or not.

    Args:
        x_t: the input as transposed E4M3 operand (K, P), or None when no weight wants a gradient.
    """
    d = dy if isinstance(dy, Gradient) else quantize_gradient(dy, biases, recipe)
    w_t, w_scale = stack_weights(list(weights), w_amax, True)
    dx = gemm(d.data, w_t, d.scale, w_scale, None, d.dtype, FAST_DGRAD)
    sizes = [w.shape[0] for w in weights]
    dweights: tuple[Optional[Tensor], ...] = (None,) * len(weights)
    if x_t is not None:
        dweights = gemm(d.transposed, x_t, d.scale, x_scale, None, weights[0].dtype, False).split(sizes)
    dbiases: tuple[Optional[Tensor], ...] = (None,) * len(weights)
    if d.sums is not None:
        sums = d.sums.split(sizes)
        dbiases = tuple(None if b is None else s.to(b.dtype) for b, s in zip(biases, sums, strict=True))
    return LinearGrads(dx, dweights, dbiases)


# ---- norm, then linear layers that share its output -----------------------------------------------------------


class NormLinearKept(NamedTuple):
    """What `norm_linear` keeps: the normalised input in 8-bit groups (0.5 U) and a few small tensors."""

    codes: Tensor
    group_amax: Tensor
    rstd: Tensor
    y_scale: Tensor
    w_amax: Tensor


def norm_linear_forward(
    x: Tensor, norm: Norm, weights: Sequence[Tensor], biases: Sequence[Optional[Tensor]], recipe: Recipe
) -> tuple[Tensor, NormLinearKept]:
    """Norm(x) times the stacked weights: x (T, H) -> (T, sum N)."""
    mean = None
    if norm.centered:
        mean, rstd, row_amax = layernorm_stats(x, norm.weight, norm.bias, norm.eps)
    else:
        rstd, row_amax = rmsnorm_stats(x, norm.weight, norm.eps)
    y8, y_scale, codes, group_amax = norm_quantize(
        x, mean, rstd, norm.weight, norm.bias, amax(row_amax), recipe.kept_format, recipe.group_size
    )
    y, w_amax = product(y8, y_scale, weights, stack_biases(weights, biases), x.dtype)
    return y, NormLinearKept(codes, group_amax, rstd, y_scale, w_amax)


def norm_linear_backward(
    dy: Tensor | Gradient,
    dresidual: Optional[Tensor],
    kept: NormLinearKept,
    norm: Norm,
    weights: Sequence[Tensor],
    biases: Sequence[Optional[Tensor]],
    recipe: Recipe,
    want_weights: bool = True,
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor], LinearGrads]:
    """Gradients of x (the residual's own gradient added), norm weight, norm bias, and of the linear layers."""
    code, group_size = recipe.kept_format, recipe.group_size
    x_t = None
    if want_weights:
        x_t = requantize_t(kept.codes, kept.group_amax, norm.weight, norm.bias, kept.y_scale, code, group_size)
    grads = product_backward(dy, x_t, kept.y_scale, weights, biases, kept.w_amax, recipe)
    dx, dweight, dbias = norm_backward(
        grads.dx, kept.codes, kept.group_amax, kept.rstd, norm.weight, dresidual, norm.centered, code, group_size
    )
    dnorm = None if norm.weight is None else dweight.to(norm.weight.dtype)
    return dx, dnorm, None if norm.bias is None else dbias.to(norm.bias.dtype), grads


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
        dx, dnorm, dnorm_bias, grads = norm_linear_backward(
            dy, dresidual, kept, norm, weights, biases, ctx.recipe, want_weights
        )
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
    """What `linear_residual` keeps of its own: scales. Its input is what attention keeps already."""

    x_scale: Tensor
    w_amax: Tensor


def linear_residual_forward(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], residual: Tensor, x_amax: Optional[Tensor] = None
) -> tuple[Tensor, LinearResidualKept]:
    """residual + x W^T + bias, with x (T, K) quantized per tensor; x_amax: max |x| if known."""
    x8, x_scale = quantize(x, amax(x) if x_amax is None else x_amax, "e4m3")
    y, w_amax = product(x8, x_scale, [weight], bias, residual.dtype)
    return residual + y, LinearResidualKept(x_scale, w_amax)


def rebuild_input_t(x: Tensor, encoded: Optional[Encoded], scale: Tensor, recipe: Recipe) -> Tensor:
    """The kept input (16-bit x, or its 8-bit form) as transposed E4M3 operand with the forward's scale."""
    if encoded is None:
        return quantize_t(x, scale, "e4m3")
    codes, group_amax, center = encoded
    width = codes.shape[1] // group_amax.shape[1]
    return requantize_t(codes, group_amax, None, center, scale, recipe.kept_format, width)


class _LinearResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        residual: Tensor,
        recipe: Recipe,
        codes: Optional[Tensor],
        group_amax: Optional[Tensor],
        center: Optional[Tensor],
    ) -> Tensor:
        y, kept = linear_residual_forward(x, weight, bias, residual)
        ctx.recipe = recipe
        source = x if codes is None else codes
        inputs = {"x": source, "group_amax": group_amax, "center": center}
        keep(ctx, "linear_residual", **kept._asdict(), **inputs, weight=weight, bias=bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        x_scale, w_amax, source, group_amax, center, weight, bias = ctx.saved_tensors
        encoded = None if group_amax is None else Encoded(source, group_amax, center)
        x_t = rebuild_input_t(source, encoded, x_scale, ctx.recipe) if ctx.needs_input_grad[1] else None
        grads = product_backward(dy, x_t, x_scale, [weight], [bias], w_amax, ctx.recipe)
        return grads.dx, grads.dweights[0], grads.dbiases[0], dy, None, None, None, None


def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Tensor,
    recipe: Recipe,
    encoded: Optional[Encoded] = None,
) -> Tensor:
    """residual + x W^T + bias, in FP8.

    Args:
        x: (T, K); weight: (N, K); bias: (N,) or None; residual: (T, N).
        encoded: x in 8-bit groups as attention keeps it; then nothing but scales is kept here. Without it x itself
            is kept.

    Returns:
        (T, N) in the residual's dtype.
    """
    return _LinearResidual.apply(x, weight, bias, residual, recipe, *(encoded or (None, None, None)))
