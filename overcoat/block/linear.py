"""The three products of a linear layer in FP8, and a linear layer that reads no norm.

With T tokens, K in, N out (kernels/quantize.py has the layouts):

    y  = x W^T          x, W in E4M3, one scale each, found just in time
    dx = dy W           dy in the recipe's gradient format (E5M2)
    dW = dy^T x         x rebuilt from its 8-bit kept form, with the forward's scale

Weights that read the same input (q, k, v; gate, up) are one stacked operand of one GEMM. Autograd keeps the parameters
themselves, never their FP8 copies: those are made where they are used, or for a small block at its start, and freed.

With `Recipe.linear_scaling="block"` operands have a scale per block instead: 1x128 along the summed axis for x and dy,
128x128 for W. Nothing of an operand is kept for the backward then, not even its scale: the transposed layouts have
scales of their own (kernels/blockwise.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.block.operands import block_operand, operand
from overcoat.block.spec import Linear
from overcoat.formats import Quantized
from overcoat.kernels.blockwise import (
    block_quantize,
    block_quantize_both,
    block_quantize_t,
)
from overcoat.kernels.gemm import block_gemm, gemm
from overcoat.kernels.groups import group_encode
from overcoat.kernels.quantize import amax, quantize, quantize_both, quantize_t
from overcoat.recipe import Recipe

# Fast accumulation in a block's backward: wgrad 4 to 7% faster on a hot H200 (gemm.jsonl). FP8 leaves 17 to 27 dB, and
# its own error is 55 dB and more below a trained model's dgrad, and 48 (worst 41) below its wgrad over 8,192 tokens
# (accumulation.jsonl). It grows with the number of terms, which wgrad's tokens are, and with their mean: for operands
# with means of half their deviation it is 36 dB over 8,192 tokens, 28 over 16,384 (docs/research/kernels.md).
FAST_DGRAD = True
FAST_WGRAD_TOKENS = 8192
# Told of the operands of products while somebody looks (models/recording.py).
watchers: list[Any] = []


def _watch(kind: str, linear: Linear, codes: Tensor, scale: Tensor) -> None:
    if not torch.compiler.is_compiling():
        for watcher in watchers:
            watcher.saw(kind, linear.weights, codes, scale)


def stack_biases(linear: Linear) -> Optional[Tensor]:
    """One bias for the stacked weights, zeros where a layer has none; None if no layer has one."""
    weights, biases, orders, scale, *_ = linear
    if not linear.has_bias:
        return None
    orders = orders or (None,) * len(weights)
    stacked = [
        w.new_zeros(w.shape[0]) if b is None else b if order is None else order.take(b)
        for w, b, order in zip(weights, biases, orders, strict=True)
    ]
    bias = stacked[0] if len(stacked) == 1 else torch.cat(stacked)
    return bias if scale == 1.0 else bias * scale


def linear_block_gemm(x: Quantized, linear: Linear, dtype: torch.dtype, residual: Optional[Tensor] = None) -> Tensor:
    """y = x W^T + bias + residual (T, N) of x (T, K) in 1x128 blocks and the stacked weights."""
    weight, scale = block_operand(linear, False)
    _watch("input", linear, x.data, x.scale)
    _watch("weight", linear, weight, scale)
    x_scale = x.scale if linear.scale == 1.0 else x.scale * linear.scale
    y = block_gemm(x.data, weight, x_scale, scale, True, stack_biases(linear), dtype)
    return y if residual is None else y.add_(residual)


def linear_gemm(
    x8: Tensor,
    x_scale: Tensor,
    linear: Linear,
    dtype: torch.dtype,
    w_amax: Optional[Tensor] = None,
    residual: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """y = x W^T + bias + residual of the stacked weights; and, for the backward, the weights' common maximum, found
    unless given."""
    w8, w_scale, w_amax = operand(linear, False, w_amax)
    _watch("input", linear, x8, x_scale)
    _watch("weight", linear, w8, w_scale)
    x_scale = x_scale if linear.scale == 1.0 else x_scale * linear.scale
    return gemm(x8, w8, x_scale, w_scale, stack_biases(linear), dtype, True, residual), w_amax


class LinearGrads(NamedTuple):
    """Gradients of a (stacked) linear layer: of its input, of each weight, of each bias (None where not needed)."""

    dx: Optional[Tensor]
    dweights: tuple[Optional[Tensor], ...]
    dbiases: tuple[Optional[Tensor], ...]


class Gradient(NamedTuple):
    """An output gradient (T, N) as FP8 operand of both products that read it, made once for both.

    data (T, N), for dgrad, None when that has read it for the last time; transposed (N, P), for wgrad, None where no
    weight wants a gradient; their 0-d scale; sums (N,) FP32 over the tokens, for biases, or None; dtype of the
    activations. With block scales `scale` is data's and `scale_t` transposed's.
    """

    data: Optional[Tensor]
    transposed: Optional[Tensor]
    scale: Tensor
    sums: Optional[Tensor]
    dtype: torch.dtype
    scale_t: Optional[Tensor] = None


def quantize_gradient(
    dy: Tensor, linear: Linear, recipe: Recipe, dy_amax: Optional[Tensor] = None, want_weights: bool = True
) -> Gradient:
    """dy (T, N), times `Linear.scale`, in the recipe's gradient format; dy_amax: max |dy| if known."""
    dy, factor, fmt = dy.contiguous(), linear.scale, recipe.grad_format
    sums = dy.sum(0, dtype=torch.float32) if linear.has_bias else None
    transposed = scale_t = None
    if recipe.linear_scaling == "block":
        if want_weights:
            data, scale, transposed, scale_t = block_quantize_both(dy, fmt)
        else:
            data, scale = block_quantize(dy, fmt)
    else:
        dy_amax = amax(dy) if dy_amax is None else dy_amax
        if want_weights:
            data, transposed, scale = quantize_both(dy, dy_amax, fmt)
        else:
            data, scale = quantize(dy, dy_amax, fmt)
    if factor != 1.0:
        scale, scale_t, sums = [None if x is None else x * factor for x in (scale, scale_t, sums)]
    return Gradient(data, transposed, scale, sums, dy.dtype, scale_t)


def quantize_blocks_of(dz: Tensor | Gradient, linear: Linear, recipe: Recipe) -> Tensor | Gradient:
    """With block scales: quantized here, so that dz in 16 bits is gone before the products; but adapters read it."""
    if isinstance(dz, Gradient) or recipe.linear_scaling != "block" or linear.adapters:
        return dz
    return quantize_gradient(dz, linear, recipe)


def dgrad(d: Gradient, linear: Linear, w_amax: Optional[Tensor]) -> Tensor:
    """dx = dy W (T, K) of the stacked weights; w_amax: their maximum, None with block scales."""
    assert d.data is not None
    _watch("gradient", linear, d.data, d.scale)
    if w_amax is None:
        weight, scale = block_operand(linear, True)
        return block_gemm(d.data, weight, d.scale, scale, True, None, d.dtype)
    w_t, w_scale, _ = operand(linear, True, w_amax)
    return gemm(d.data, w_t, d.scale, w_scale, None, d.dtype, FAST_DGRAD)


def wgrad(d: Gradient, x_t: Quantized, dtype: torch.dtype) -> Tensor:
    """dW = dy^T x (N, K), with x as transposed operand (K, P)."""
    assert d.transposed is not None
    if d.scale_t is not None:
        return block_gemm(d.transposed, x_t.data, d.scale_t, x_t.scale, False, None, dtype)
    fast = d.transposed.shape[1] <= FAST_WGRAD_TOKENS
    return gemm(d.transposed, x_t.data, d.scale, x_t.scale, None, dtype, fast)


def linear_backward(
    dy: Tensor | Gradient,
    x_t: Optional[Quantized],
    linear: Linear,
    w_amax: Optional[Tensor],
    recipe: Recipe,
    dy_amax: Optional[Tensor] = None,
) -> LinearGrads:
    """dgrad and wgrad from dy (T, N), quantized already or not. x_t: the input as transposed E4M3 operand (K, P), or
    None when no weight wants a gradient; dy_amax: max |dy| if known."""
    d = dy if isinstance(dy, Gradient) else quantize_gradient(dy, linear, recipe, dy_amax, x_t is not None)
    dx = dgrad(d, linear, w_amax)
    stacked = None if x_t is None else wgrad(d, x_t, linear.weights[0].dtype)
    return LinearGrads(dx, *split_gradients(stacked, d.sums, linear))


def split_gradients(
    dweight: Optional[Tensor], sums: Optional[Tensor], linear: Linear
) -> tuple[tuple[Optional[Tensor], ...], tuple[Optional[Tensor], ...]]:
    """Gradients of each weight and bias from those of the stack."""
    weights, biases, orders, *_ = linear
    if len(weights) == 1 and not orders:
        return (dweight,), (None if sums is None or biases[0] is None else sums.to(biases[0].dtype),)
    orders = orders or (None,) * len(weights)
    sizes = [w.shape[0] if order is None else order.count(w) for w, order in zip(weights, orders, strict=True)]

    def parts(stacked: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        if stacked is None:
            return (None,) * len(sizes)
        split = stacked.split_with_sizes(sizes)
        return tuple([x if order is None else order.put_back(x) for x, order in zip(split, orders, strict=True)])

    pairs = zip(biases, parts(sums), strict=True)
    dbiases = tuple([None if b is None or s is None else s.to(b.dtype) for b, s in pairs])
    return parts(dweight), dbiases


class OutputSaved(NamedTuple):
    """What an output layer keeps: scales (none per block). Its input is kept, or computed again, by the core."""

    x_scale: Optional[Tensor]
    w_amax: Optional[Tensor]


def linear_forward(
    x: Tensor,
    linear: Linear,
    dtype: torch.dtype,
    recipe: Recipe,
    x_amax: Optional[Tensor] = None,
    w_amax: Optional[Tensor] = None,
    residual: Optional[Tensor] = None,
) -> tuple[Tensor, OutputSaved]:
    """x W^T + bias + residual in `dtype`, x (T, K); x_amax, w_amax: max |x| and max |weight| if known."""
    if recipe.linear_scaling == "block":
        y = linear_block_gemm(Quantized(*block_quantize(x, "e4m3")), linear, dtype, residual)
        return y, OutputSaved(None, None)
    x8, x_scale = quantize(x, amax(x) if x_amax is None else x_amax, "e4m3")
    y, w_amax = linear_gemm(x8, x_scale, linear, dtype, w_amax, residual)
    return y, OutputSaved(x_scale, w_amax)


def rebuild_input_t(x: Tensor, scale: Optional[Tensor]) -> Quantized:
    """The input x in 16 bits as transposed E4M3 operand, with the forward's scale if kept."""
    if scale is None:
        return Quantized(*block_quantize_t(x, "e4m3"))
    return Quantized(quantize_t(x, scale, "e4m3"), scale)


class InputSaved(NamedTuple):
    """What linear layers keep that read the residual stream itself: their input in 8-bit groups, scales."""

    codes: Tensor
    group_amax: Tensor
    scale: Optional[Tensor]
    w_amax: Optional[Tensor]


def stream_linear_forward(
    x: Tensor, in_proj: Linear, recipe: Recipe, w_amax: Optional[Tensor] = None
) -> tuple[Tensor, InputSaved]:
    """x (T, H) times the stacked weights -> (T, sum N); w_amax: the weights' maximum if known."""
    codes, group_amax = group_encode(x, recipe.kept_format, recipe.group_size)
    y, scales = linear_forward(x, in_proj, x.dtype, recipe, w_amax=w_amax)
    return y, InputSaved(codes, group_amax, *scales)
