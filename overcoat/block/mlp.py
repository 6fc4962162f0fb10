"""The second half of an MLP: its activation (gated or not), the second projection, and the residual.

Keeps z, the first projection, in 8-bit groups (I / 2H U, twice that with a gate), and not h = f(z): the backward
rebuilds h from the codes in the pass that computes the gradient of z (kernels/activation_backward.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.block.adapters import (
    Input,
    adapter_gradients,
    add_adapters_,
    add_input_gradient_,
    stack_adapters,
)
from overcoat.block.linear import (
    Gradient,
    block_product,
    dgrad,
    product,
    quantize_gradient,
    split_gradients,
    wgrad,
    whole_blocks,
)
from overcoat.block.spec import Adapter, Branch, Linear, Scales, Tables
from overcoat.formats import Quantized
from overcoat.kernels.activation import activation_block_quantize, activation_encode, activation_quantize
from overcoat.kernels.activation_backward import activation_backward, activation_gradient_bound
from overcoat.kernels.activation_blockwise import activation_block_backward
from overcoat.kernels.activation_decode import activation_decode
from overcoat.kernels.groups import group_encode
from overcoat.recipe import Recipe


class MlpSaved(NamedTuple):
    """What the MLP's second half keeps: z in 8-bit groups, maxima (T, 2 or 1, n), and two scales (none per block)."""

    codes: Tensor
    group_amax: Tensor
    h_scale: Optional[Tensor]
    w_amax: Optional[Tensor]


def mlp_forward(
    z: Tensor,
    out: Linear,
    residual: Optional[Tensor],
    activation: str,
    gated: bool,
    recipe: Recipe,
) -> tuple[Tensor, MlpSaved]:
    """residual + h W^T + bias (T, N), in FP8.

    Args:
        z: (T, I), the first projection with its bias, h = f(z); if `gated` (T, 2I), h = f(first half) * second half.
        out: weight (N, I), bias (N,) or None. residual: (T, N), whose dtype the result has, or None.
        activation: f, a name in kernels/activation_functions.py.

    Raises:
        ValueError: no such activation.
    """
    dtype = z.dtype if residual is None else residual.dtype
    code, group_size = recipe.kept_format, recipe.group_size
    if recipe.linear_scaling == "block":
        h8, h_scale, codes, group_amax = activation_block_quantize(z, activation, gated, code, group_size)
        y = block_product(Quantized(h8, h_scale), out, dtype)
        y, kept = y if residual is None else residual + y, MlpSaved(codes, group_amax, None, None)
    else:
        codes, group_amax, h_amax = activation_encode(z, activation, gated, code, group_size)
        h8, h_scale = activation_quantize(z, h_amax, activation, gated)
        y, w_amax = product(h8, h_scale, out, dtype, None, residual)
        kept = MlpSaved(codes, group_amax, h_scale, w_amax)
    if out.adapters:
        add_adapters_(y, out, _decoded(kept, activation, recipe, dtype))
    return y, kept


def _decoded(kept: MlpSaved, activation: str, recipe: Recipe, dtype: torch.dtype) -> Input:
    """h (T, I) in 16 bits, for adapters. E4M3's error in it would be up to 1.4 dB of their gradients."""
    how = (activation, recipe.kept_format, recipe.group_size)
    return Input(activation_decode(kept.codes, kept.group_amax, *how, dtype))


def mlp_recompute(
    z: Tensor, h_scale: Optional[Tensor], w_amax: Optional[Tensor], activation: str, gated: bool, recipe: Recipe
) -> MlpSaved:
    """What `mlp_forward` keeps, without its result: a recomputation needs no product (5% of a block)."""
    tokens, parts = z.shape[0], 1 + gated
    halves = z.reshape(tokens * parts, z.shape[1] // parts)  # no group spans gate and up
    codes, group_amax = group_encode(halves, recipe.kept_format, recipe.group_size)
    return MlpSaved(codes.view(tokens, -1), group_amax.view(tokens, parts, -1), h_scale, w_amax)


def _gradient(
    dh: Tensor, saved: MlpSaved, activation: str, recipe: Recipe, quantized: bool, has_bias: bool
) -> tuple[Tensor | Gradient, Quantized]:
    """Gradient of z, `quantized` in both FP8 layouts or in 16 bits, and h as transposed operand."""
    codes, group_amax, scale, _ = saved
    fmt, how = recipe.grad_format, (activation, recipe.kept_format, recipe.group_size)
    if scale is None:
        if quantized and (group_amax.shape[1] == 1 or whole_blocks(dh.shape[1])):
            data, d_scale, data_t, d_scale_t, h_t, h_scale, sums = activation_block_backward(
                dh, codes, group_amax, fmt, has_bias, *how
            )
            d = Gradient(data, data_t, d_scale, sums if has_bias else None, dh.dtype, d_scale_t)
            return d, Quantized(h_t, h_scale)
        dz, h_t, h_scale = activation_block_backward(dh, codes, group_amax, None, False, *how)
        return dz, Quantized(h_t, h_scale)
    if quantized:
        bound = activation_gradient_bound(dh, group_amax, activation, recipe.group_size)
        data, data_t, d_scale, sums, h_t = activation_backward(dh, codes, group_amax, scale, bound, fmt, has_bias, *how)
        return Gradient(data, data_t, d_scale, sums if has_bias else None, dh.dtype), Quantized(h_t, scale)
    dz, h_t = activation_backward(dh, codes, group_amax, scale, None, None, False, *how)
    return dz, Quantized(h_t, scale)


def mlp_backward(
    dy: Tensor,
    saved: MlpSaved,
    linear: Linear,
    activation: str,
    gated: bool,
    recipe: Recipe,
    *,
    quantized: bool,
    into_has_bias: bool,
    want_weight: bool,
    dy_amax: Optional[Tensor] = None,
) -> tuple[Tensor | Gradient, Linear]:
    """Gradients of z and of the second projection; the residual's gradient is dy itself.

    Args:
        dy: (T, N); dy_amax: max |dy| if known.
        quantized: the gradient of z goes straight into both FP8 layouts and never exists in 16 bits, unless a block of
            it would span gate and up.
        into_has_bias: whether the first projection has a bias, whose gradient then comes along (`Gradient.sums`).
        want_weight: whether the second projection's weight wants a gradient.
    """
    assert saved.group_amax.shape[1] == 1 + gated
    d = quantize_gradient(dy, linear, recipe, dy_amax, want_weight)
    dh = dgrad(d, linear, saved.w_amax)
    d = d._replace(data=None)
    if linear.adapters:
        stacked = stack_adapters(linear, dy.dtype)
        g = add_input_gradient_(dy, dh, stacked)
    dz, h_t = _gradient(dh, saved, activation, recipe, quantized, into_has_bias)
    del dh  # I / H U, which the weight's gradient can use
    dweight = wgrad(d, h_t, linear.weights[0].dtype) if want_weight else None
    adapters: tuple[Adapter, ...] = ()
    if linear.adapters:
        adapters = adapter_gradients(dy, g, linear, stacked, _decoded(saved, activation, recipe, dy.dtype))
    return dz, Linear(*split_gradients(dweight, d.sums, linear), adapters=adapters)


class Mlp(NamedTuple):
    """activation: a name in kernels/activation_functions.py; gated: times the second half of the columns."""

    activation: str
    gated: bool

    @property
    def saved(self) -> tuple[type[Any], ...]:
        """What `output` leaves behind, in order."""
        return (MlpSaved,)

    @property
    def names(self) -> tuple[str, ...]:
        """In the memory report: of the layers before, of each of `saved`, of the norm after."""
        return ("mlp input", "mlp", "mlp norm")

    def inside(self, z: Tensor, _branch: Branch, _tables: Tables, _recipe: Recipe, _saved: list[Any]) -> Tensor:
        """Nothing of its own: the activation is part of writing the output layer's operand."""
        return z

    def output(
        self, z: Tensor, branch: Branch, residual: Optional[Tensor], recipe: Recipe, saved: list[Any], _known: Scales
    ) -> tuple[Tensor, bool]:
        """The output layer's result, the residual added if given; whether it is."""
        y, kept = mlp_forward(z, branch.out, residual, self.activation, self.gated, recipe)
        saved.append(kept)
        return y, residual is not None

    def recompute(self, z: Tensor, _branch: Branch, recipe: Recipe, saved: list[Any], known: Scales) -> None:
        """What `output` keeps, without its result: the product would be 5% of a block."""
        saved.append(mlp_recompute(z, known.inner, known.out, self.activation, self.gated, recipe))

    def backward(
        self,
        dy: Tensor,
        dy_amax: Optional[Tensor],
        saved: list[Any],
        branch: Branch,
        _tables: Tables,
        recipe: Recipe,
        want_out: bool,
    ) -> tuple[Tensor | Gradient, Linear, tuple[()]]:
        """Gradients of the stacked layers' result and of the output layer. Takes what it reads from `saved`."""
        dz, dout = mlp_backward(
            dy, saved.pop(), branch.out, self.activation, self.gated, recipe,
            quantized=len(branch.into.adapters) == 0, into_has_bias=branch.into.has_bias, want_weight=want_out,
            dy_amax=dy_amax,
        )  # fmt: skip
        return dz, dout, ()

    def scales(self, saved: list[Any]) -> tuple[Optional[Tensor], Optional[Tensor]]:
        """Of the last things saved, by `output`: `Scales.inner` and `Scales.out`."""
        return saved[-1].h_scale, saved[-1].w_amax
