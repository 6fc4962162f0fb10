"""The three products of a linear layer in FP8, shared by linear.py, mlp.py and attention.py.

With T tokens, K in, N out (kernels/quantize.py has the layouts):

    y  = x W^T          x, W in E4M3, one scale each, found just in time
    dx = dy W           dy in the recipe's gradient format (E5M2)
    dW = dy^T x         x rebuilt from its 8-bit kept form, with the forward's scale

Weights that read the same input (q, k, v; gate, up) are one stacked operand of one GEMM (weights.py). With
`Recipe.linear_scaling="block"` operands have a scale per block instead (blockwise.py).
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from overcoat.formats import Quantized
from overcoat.kernels.blockwise import block_quantize_both
from overcoat.kernels.gemm import gemm
from overcoat.kernels.quantize import amax, quantize_both
from overcoat.ops import blockwise
from overcoat.ops.weights import operand
from overcoat.recipe import Recipe

# Fast accumulation in a block's backward: wgrad 4 to 7% faster on a hot H200 (gemm.jsonl). FP8 leaves 17 to 27 dB, and
# its own error is 55 dB and more below a trained model's dgrad, and 48 (worst 41) below its wgrad over 8,192 tokens
# (accumulation.jsonl). It grows with the number of terms, which wgrad's tokens are, and with their mean: for operands
# with means of half their deviation it is 36 dB over 8,192 tokens, 28 over 16,384 (docs/log-kernels.md).
FAST_DGRAD = True
FAST_WGRAD_TOKENS = 8192


def stack_biases(weights: Sequence[Tensor], biases: Sequence[Optional[Tensor]]) -> Optional[Tensor]:
    """One bias for the stacked weights, zeros where a layer has none; None if no layer has one."""
    if all(bias is None for bias in biases):
        return None
    if len(biases) == 1:
        return biases[0]
    return torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)])


def product(
    x8: Tensor,
    x_scale: Tensor,
    weights: Sequence[Tensor],
    bias: Optional[Tensor],
    dtype: torch.dtype,
    w_amax: Optional[Tensor] = None,
    residual: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """y = x W^T + bias of the stacked weights, plus a residual (T, N) if given.

    Also the weights' common maximum (found unless given), for the backward.
    """
    w8, w_scale, w_amax = operand(weights, False, w_amax)
    return gemm(x8, w8, x_scale, w_scale, bias, dtype, True, residual), w_amax


class LinearGrads(NamedTuple):
    """Gradients of a (stacked) linear layer: of its input, of each weight, of each bias (None where not needed)."""

    dx: Optional[Tensor]
    dweights: tuple[Optional[Tensor], ...]
    dbiases: tuple[Optional[Tensor], ...]


class Gradient(NamedTuple):
    """An output gradient (T, N) as FP8 operand of both products that read it, made once for both.

    data (T, N), for dgrad, None when that has read it for the last time; transposed (N, P), for wgrad; their 0-d scale;
    sums (N,) FP32 over the tokens, for biases, or None; dtype of the activations. With block scales `scale` is data's
    and `scale_t` transposed's.
    """

    data: Optional[Tensor]
    transposed: Tensor
    scale: Tensor
    sums: Optional[Tensor]
    dtype: torch.dtype
    scale_t: Optional[Tensor] = None


def quantize_gradient(
    dy: Tensor, biases: Sequence[Optional[Tensor]], recipe: Recipe, dy_amax: Optional[Tensor] = None
) -> Gradient:
    """dy (T, N) in the recipe's gradient format; dy_amax: max |dy| if known."""
    dy = dy.contiguous()
    sums = None if all(bias is None for bias in biases) else dy.sum(0, dtype=torch.float32)
    if recipe.linear_scaling == "block":
        data, scale, transposed, scale_t = block_quantize_both(dy, recipe.grad_format)
        return Gradient(data, transposed, scale, sums, dy.dtype, scale_t)
    data, transposed, scale = quantize_both(dy, amax(dy) if dy_amax is None else dy_amax, recipe.grad_format)
    return Gradient(data, transposed, scale, sums, dy.dtype)


def dgrad(d: Gradient, weights: Sequence[Tensor], w_amax: Optional[Tensor]) -> Tensor:
    """dx = dy W (T, K) of the stacked weights; w_amax: their maximum, None with block scales."""
    assert d.data is not None
    if w_amax is None:
        return blockwise.dgrad(Quantized(d.data, d.scale), weights, d.dtype)
    w_t, w_scale, _ = operand(weights, True, w_amax)
    return gemm(d.data, w_t, d.scale, w_scale, None, d.dtype, FAST_DGRAD)


def wgrad(d: Gradient, x_t: Quantized, dtype: torch.dtype) -> Tensor:
    """dW = dy^T x (N, K), with x as transposed operand (K, P)."""
    if d.scale_t is not None:
        return blockwise.wgrad(Quantized(d.transposed, d.scale_t), x_t, dtype)
    fast = d.transposed.shape[1] <= FAST_WGRAD_TOKENS
    return gemm(d.transposed, x_t.data, d.scale, x_t.scale, None, dtype, fast)


def product_backward(
    dy: Tensor | Gradient,
    x_t: Optional[Quantized],
    weights: Sequence[Tensor],
    biases: Sequence[Optional[Tensor]],
    w_amax: Optional[Tensor],
    recipe: Recipe,
    dy_amax: Optional[Tensor] = None,
) -> LinearGrads:
    """dgrad and wgrad from dy (T, N), quantized already or not.

    Args:
        x_t: the input as transposed E4M3 operand (K, P), or None when no weight wants a gradient.
        dy_amax: max |dy| if known.
    """
    d = dy if isinstance(dy, Gradient) else quantize_gradient(dy, biases, recipe, dy_amax)
    dx = dgrad(d, weights, w_amax)
    sizes = [w.shape[0] for w in weights]
    dweights: tuple[Optional[Tensor], ...] = (None,) * len(weights)
    if x_t is not None:
        dweights = wgrad(d, x_t, weights[0].dtype).split_with_sizes(sizes)
    dbiases: tuple[Optional[Tensor], ...] = (None,) * len(weights)
    if d.sums is not None:
        sums = d.sums.split_with_sizes(sizes)
        dbiases = tuple(None if b is None else s.to(b.dtype) for b, s in zip(biases, sums, strict=True))
    return LinearGrads(dx, dweights, dbiases)
