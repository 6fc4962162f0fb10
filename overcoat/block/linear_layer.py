"""A linear layer in FP8 by itself, where no block is known that computes what is around it.

    y  = x W^T + b      x, W in E4M3, one scale each, found just in time
    dx = dy W           dy in the recipe's gradient format (E5M2)
    dW = dy^T x         x as the forward's E4M3 operand

x is saved as that operand, one byte for each element instead of two, and once for all layers that read the same tensor
(q, k, v; gate, up; the low-rank inputs of latent attention): `SharedInput` remembers the operand of the last tensor. A
frozen weight saves no x.

Legend: T tokens, K in, N out.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.block.linear import linear_backward, linear_block_gemm, linear_gemm
from overcoat.block.spec import Linear
from overcoat.formats import Quantized
from overcoat.kernels.blockwise import block_quantize_both
from overcoat.kernels.op import check_no_transforms, first_order
from overcoat.kernels.quantize import amax, quantize, transpose_padded
from overcoat.memory import keep, release_saved
from overcoat.recipe import Recipe


class Operand(NamedTuple):
    """A layer's input as FP8 operand: codes (T, K) and their scale for the forward; for wgrad, with block scales alone,
    transposed (K, P) and its own scales."""

    codes: Tensor
    scale: Tensor
    transposed: Optional[Tensor] = None
    scale_t: Optional[Tensor] = None


class SharedInput:
    """The operand of the tensor that was quantized last, for other layers that read the same one.

    A tensor is the same if it is the same object at the same version (no write in place since). Compiled code has no
    objects: there each layer quantizes, and the compiler merges equal work.
    """

    def __init__(self) -> None:
        self._last: Optional[tuple[weakref.ref[Tensor], int, Recipe, Operand]] = None

    def operand(self, x: Tensor, recipe: Recipe, for_wgrad: bool) -> Operand:
        """Return x (..., K) as operand of (T, K); for_wgrad: a weight wants a gradient."""
        if torch.compiler.is_compiling() or x.is_inference():  # no version counter
            return _quantized(x, recipe, for_wgrad)
        if self._last is not None:
            source, version, of, operand = self._last
            is_enough = operand.transposed is not None or not for_wgrad or recipe.linear_scaling == "tensor"
            if source() is x and version == x._version and of == recipe and is_enough:
                return operand
        operand = _quantized(x, recipe, for_wgrad)
        self._last = (weakref.ref(x, self._forget), x._version, recipe, operand)
        return operand

    def _forget(self, source: Any) -> None:
        if self._last is not None and self._last[0] is source:
            self._last = None

    def __deepcopy__(self, memo: Any) -> SharedInput:
        return SharedInput()

    def __reduce__(self) -> Any:
        return SharedInput, ()


def quantized_input(x: Tensor, shared: Optional[SharedInput], recipe: Recipe, for_wgrad: bool) -> Operand:
    """Return x (T, K) as operand with one scale, whatever the recipe's scaling is; shared: of all that may read x."""
    if recipe.linear_scaling == "tensor":
        return (shared or SharedInput()).operand(x, recipe, for_wgrad)
    rows = x.detach().contiguous()
    return Operand(*quantize(rows, amax(rows), "e4m3"))


@torch.no_grad()
def _quantized(x: Tensor, recipe: Recipe, for_wgrad: bool) -> Operand:
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    if recipe.linear_scaling == "block":
        codes, scale, transposed, scale_t = block_quantize_both(rows, "e4m3")
        return Operand(codes, scale, *((transposed, scale_t) if for_wgrad else ()))
    return Operand(*quantize(rows, amax(rows), "e4m3"))


class _LinearLayer(torch.autograd.Function):
    """Saves the operand of x for wgrad, and the weight itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        operand: Operand,
        dtype: torch.dtype,
        recipe: Recipe,
    ) -> Tensor:
        linear = Linear((weight,), (bias,))
        w_amax: Optional[Tensor] = None
        if recipe.linear_scaling == "block":
            y = linear_block_gemm(Quantized(operand.codes, operand.scale), linear, dtype)
            kept: tuple[Optional[Tensor], ...] = (operand.transposed, operand.scale_t)
        else:
            y, w_amax = linear_gemm(operand.codes, operand.scale, linear, dtype)
            kept = (operand.codes, operand.scale)
        codes, scale = kept if weight.requires_grad else (None, None)
        keep(ctx, "linear", codes=codes, scale=scale, w_amax=w_amax, weight=weight, bias=bias)
        ctx.recipe, ctx.shape = recipe, x.shape
        # Not a view, which nothing may change in place.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        codes, scale, w_amax, weight, bias = ctx.saved_tensors
        release_saved(ctx)
        x_t = None
        if ctx.needs_input_grad[1]:
            x_t = Quantized(codes if w_amax is None else transpose_padded(codes), scale)
        del codes
        linear = Linear((weight,), (bias,))
        found = linear_backward(dy.reshape(-1, dy.shape[-1]), x_t, linear, w_amax, ctx.recipe)
        dx = None if found.dx is None else found.dx.view(ctx.shape)
        return dx, found.dweights[0], found.dbiases[0], None, None, None


def linear_layer(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], recipe: Recipe, shared: Optional[SharedInput] = None
) -> Tensor:
    """Return x W^T + bias (..., N) of x (..., K) in FP8, in x's dtype or autocast's.

    Args:
        weight: (N, K), K and N multiples of 16. bias: (N,) or None.
        shared: of all layers that may read the same x.
    """
    check_no_transforms()
    dtype = x.dtype
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    operand = (shared or SharedInput()).operand(x, recipe, weight.requires_grad)
    return _LinearLayer.apply(x, weight, bias, operand, dtype, recipe)
