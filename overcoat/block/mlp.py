"""The second half of an MLP: its activation (gated or not), the second projection, and the residual.

Saves z, the first projection's output, in 8-bit groups (I / 2H U, twice that with a gate), and not h = f(z): the
backward recomputes h in the pass that computes the gradient of z (kernels/activation.py).

Legend: T tokens, I the MLP's width, H hidden width, n groups, U as in memory.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.block.adapters import (
    FactorGradients,
    Input,
    adapter_gradients,
    add_adapters_,
    add_input_gradient_,
    before_factors,
    has_factors,
    stack_adapters,
)
from overcoat.block.linear import (
    Gradient,
    dgrad,
    linear_block_gemm,
    linear_gemm,
    quantize_blocks_of,
    quantize_gradient,
    split_gradients,
    wgrad,
)
from overcoat.block.spec import Adapter, Branch, ForwardScales, Linear, Tables
from overcoat.formats import Quantized
from overcoat.kernels.activation import (
    activation_backward,
    activation_block_quantize,
    activation_decode,
    activation_encode,
    activation_gradient_bound,
    activation_quantize,
)
from overcoat.kernels.groups import group_encode
from overcoat.recipe import Recipe


class MlpSaved(NamedTuple):
    """Tensors saved by an MLP: z in 8-bit groups, maxima (T, 2 if gated else 1, n); 0-d scales, None per block."""

    codes: Tensor
    group_amax: Tensor
    h_scale: Optional[Tensor]
    w_amax: Optional[Tensor]


class Mlp(NamedTuple):
    """The mixer h = f(z) of z (T, I), or if `gated` h = f(first half of z) * second half, z (T, 2 I).

    activation: f's name in kernels/activation_functions.py.
    """

    activation: str
    gated: bool

    @property
    def saved(self) -> tuple[type[Any], ...]:
        """Types of the tensors that `output` saves, in order."""
        return (MlpSaved,)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the memory report: of the input layers, of each of `saved`, of the norm after."""
        return ("mlp input", "mlp", "mlp norm")

    def inside(self, z: Tensor, _branch: Branch, _tables: Tables, _recipe: Recipe, _saved: list[Any]) -> Tensor:
        """Return z: `output` applies the activation as it writes the output layer's FP8 operand."""
        return z

    def output(
        self,
        z: Tensor,
        branch: Branch,
        recipe: Recipe,
        saved: list[Any],
        _cached: ForwardScales,
        residual: Optional[Tensor],
    ) -> Tensor:
        """Return h W^T + bias + residual (T, N) and append to `saved`; z includes the first projection's bias."""
        out_proj = branch.out_proj
        early, after = (None, residual) if out_proj.adapters and has_factors(out_proj) else (residual, None)
        how = (self.activation, self.gated, recipe.kept_format, recipe.group_size)
        if recipe.linear_scaling == "block":
            h8, h_scale, codes, group_amax = activation_block_quantize(z, *how)
            y = linear_block_gemm(Quantized(h8, h_scale), out_proj, z.dtype, early)
            entry = MlpSaved(codes, group_amax, None, None)
        else:
            codes, group_amax, h_amax = activation_encode(z, *how)
            h8, h_scale = activation_quantize(z, h_amax, self.activation, self.gated)
            y, w_amax = linear_gemm(h8, h_scale, out_proj, z.dtype, None, early)
            entry = MlpSaved(codes, group_amax, h_scale, w_amax)
        if out_proj.adapters:
            add_adapters_(y, out_proj, self._decoded(entry, recipe, z.dtype), after)
        saved.append(entry)
        return y

    def recompute(self, z: Tensor, _branch: Branch, recipe: Recipe, saved: list[Any], cached: ForwardScales) -> None:
        """Save what `output` saves, without its GEMM, which would be 5% of a block's time."""
        tokens, parts = z.shape[0], 1 + self.gated
        halves = z.reshape(tokens * parts, z.shape[1] // parts)  # no group spans gate and up
        codes, group_amax = group_encode(halves, recipe.kept_format, recipe.group_size)
        saved.append(
            MlpSaved(codes.view(tokens, -1), group_amax.view(tokens, parts, -1), cached.activation, cached.out_proj)
        )

    def backward(
        self,
        dy: Tensor,
        dy_amax: Optional[Tensor],
        saved: list[Any],
        branch: Branch,
        _tables: Tables,
        recipe: Recipe,
        out_proj_needs_grad: bool,
    ) -> tuple[Tensor | Gradient, Linear, tuple[()]]:
        """Return the gradients of z and of the output layer; pop one entry of `saved`."""
        entry, out_proj = saved.pop(), branch.out_proj
        assert entry.group_amax.shape[1] == 1 + self.gated
        dora = FactorGradients()
        if out_proj.adapters and has_factors(out_proj):
            inputs, dy_amax = self._decoded(entry, recipe, dy.dtype), None
            dy, dora = before_factors(dy, out_proj, inputs, entry.w_amax, recipe)
            del inputs
        d = quantize_gradient(dy, out_proj, recipe, dy_amax, out_proj_needs_grad)
        dh = dgrad(d, out_proj, entry.w_amax)
        d = d._replace(data=None)
        if out_proj.adapters:
            stacked = stack_adapters(out_proj, dy.dtype)
            g = add_input_gradient_(dy, dh, out_proj, stacked)
        dz, h_t = self._gradient(dh, entry, recipe, branch.in_proj)
        del dh  # free I / H U before the weight's gradient is allocated
        dweight = wgrad(d, h_t, out_proj.weights[0].dtype) if out_proj_needs_grad else None
        adapters: tuple[Adapter, ...] = ()
        if out_proj.adapters:
            inputs = self._decoded(entry, recipe, dy.dtype)
            adapters = adapter_gradients(dy, g, out_proj, stacked, inputs, dora.factors)
            del inputs
        del entry, h_t
        dweights, dbiases = split_gradients(dweight, d.sums, out_proj)
        return (
            quantize_blocks_of(dz, branch.in_proj, recipe),
            Linear(dweights, dora.biases or dbiases, adapters=adapters),
            (),
        )

    def _gradient(
        self, dh: Tensor, saved: MlpSaved, recipe: Recipe, in_proj: Linear
    ) -> tuple[Tensor | Gradient, Quantized]:
        """Return the gradient of z, and h as transposed FP8 operand.

        With one scale per tensor and no adapters, z's gradient is written straight in both FP8 layouts, with the
        first projection's bias gradient (`Gradient.sums`); otherwise it is in 16 bits.
        """
        codes, group_amax, scale, _ = saved
        fmt, how = recipe.grad_format, (self.activation, recipe.kept_format, recipe.group_size)
        in_fp8, has_bias = len(in_proj.adapters) == 0, in_proj.has_bias
        if scale is None:
            dz, h_t, h_scale = activation_backward(dh, codes, group_amax, None, None, None, False, *how)
            return dz, Quantized(h_t, h_scale)
        if not in_fp8:
            dz, h_t = activation_backward(dh, codes, group_amax, scale, None, None, False, *how)
            return dz, Quantized(h_t, scale)
        bound = activation_gradient_bound(dh, group_amax, self.activation, recipe.group_size)
        data, data_t, d_scale, sums, h_t = activation_backward(dh, codes, group_amax, scale, bound, fmt, has_bias, *how)
        return Gradient(data, data_t, d_scale, sums if has_bias else None, dh.dtype), Quantized(h_t, scale)

    def _decoded(self, saved: MlpSaved, recipe: Recipe, dtype: torch.dtype) -> Input:
        """Return h (T, I) in 16 bits, for adapters: h in E4M3 would cost their gradients up to 1.4 dB."""
        how = (self.activation, recipe.kept_format, recipe.group_size)
        return Input(activation_decode(saved.codes, saved.group_amax, *how, dtype))

    def scales(self, saved: list[Any]) -> tuple[Optional[Tensor], Optional[Tensor]]:
        """Return `ForwardScales.activation` and `ForwardScales.out_proj` from the last entry of `saved`."""
        return saved[-1].h_scale, saved[-1].w_amax
