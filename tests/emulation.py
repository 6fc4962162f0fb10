"""The same model with FP8 GEMMs alone: every other tensor exact, in FP64.

`emulate_fp8_gemms(model)` replaces each group of linear layers that read one input (q, k, v; o; gate, up; down) by an
FP64 product of quantized operands: E4M3 for input and (stacked) weights, the recipe's format for the output gradient,
with one scale per tensor or per block. That is the error floor of any FP8 trainer; what Overcoat adds by keeping 8-bit
tensors is held against it.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from overcoat.block.experts import Experts, Weights
from overcoat.block.reference import ACTIVATIONS
from overcoat.formats import E4M3, FLOAT8, Float8, dequantize_blocks, quantize_blocks, quantize_tensor
from overcoat.models.experts import weights_of
from overcoat.models.family import decoder_layers, family_of
from overcoat.models.lora import base_of


def sqnr(reference: Tensor, value: Tensor) -> float:
    """Signal to quantization noise, in dB."""
    reference, value = reference.detach().double(), value.detach().double()
    noise = (reference - value).norm()
    return float(20 * torch.log10(reference.norm() / noise.clamp_min(1e-300)))


def rounded(x: Tensor, fmt: Float8, block: tuple[int, int] | None = None) -> Tensor:
    """x as FP8 with one scale for the tensor, or for each block of (rows, columns), back in FP64."""
    if block is not None:
        return dequantize_blocks(quantize_blocks(x, block, fmt), block).double()
    data, scale = quantize_tensor(x, fmt)
    return data.double() * scale.double()


class _Product(torch.autograd.Function):
    """y = x W^T; blocks lie along the axis that a product contracts, so dy and x are rounded once for each product."""

    @staticmethod
    def forward(ctx, x, weight, grad_format, in_blocks):
        ctx.row, ctx.column, square = ((1, 128), (128, 1), (128, 128)) if in_blocks else (None, None, None)
        weight8 = rounded(weight, E4M3, square)
        ctx.save_for_backward(x, weight8)
        ctx.grad_format = grad_format
        return rounded(x, E4M3, ctx.row) @ weight8.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight8 = ctx.saved_tensors
        fmt = FLOAT8[ctx.grad_format]
        dweight = rounded(dy, fmt, ctx.column).t() @ rounded(x, E4M3, ctx.column)
        return rounded(dy, fmt, ctx.row) @ weight8, dweight, None, None


def _rows(layer: nn.Module) -> Tensor:
    """Its weight (N, K); GPT-2 stores it transposed."""
    return layer.weight if hasattr(layer, "out_features") else layer.weight.t()


class _Stack:
    """Linear layers with one input: computed together when the first is called, handed out one by one."""

    def __init__(self, layers: list[nn.Linear], grad_format: str, in_blocks: bool) -> None:
        self.layers, self.grad_format, self.in_blocks, self.outputs = layers, grad_format, in_blocks, {}

    def __call__(self, index: int, x: Tensor) -> Tensor:
        if index not in self.outputs:  # Kosmos-2.5 calls k first
            weight = torch.cat([_rows(layer) for layer in self.layers]).double()
            rows = x.flatten(0, -2).double()
            y = _Product.apply(rows, weight, self.grad_format, self.in_blocks).to(x.dtype).unflatten(0, x.shape[:-1])
            self.outputs = dict(enumerate(y.split([len(_rows(layer)) for layer in self.layers], -1)))
        y, bias = self.outputs.pop(index), self.layers[index].bias
        return y.clone() if bias is None else y + bias  # OLMo changes it in place


class _Member(nn.Linear):
    """A linear layer that asks its stack; holds the parameters under their own names."""

    @classmethod
    def of(cls, layer: nn.Module) -> nn.Module:
        layer.__class__ = cls
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return self.stack[0](self.stack[1], x)


def emulate_fp8_gemms(model: nn.Module, grad_format: str = "e5m2", in_blocks: bool = False) -> nn.Module:
    """A copy of `model` in FP64 whose layers' linear layers multiply FP8 values; all else exact.

    in_blocks: scales for 1x128 activations and gradients and 128x128 weights instead of one per tensor.
    """
    model = copy.deepcopy(model).double()
    for layer in decoder_layers(model).values():
        for linears in linears_of_block(layer):  # none of a layer that `convert` leaves alone
            multiply_in_fp8(linears, grad_format, in_blocks)
    return model


def linears_of_block(layer: Any) -> list[list[nn.Module]]:
    """The linear layers that the block of a layer's family computes, those with one input together."""
    family = family_of(layer)
    own = [] if family is None else [b for b in family.branches(layer, 1) if b.mixer is not None]  # not experts
    return [[base_of(linear) for linear in part] for branch in own for part in (branch.in_proj, (branch.out_proj,))]


def experts_alone(
    x: Tensor, index: Tensor, weights: Tensor, parameters: Weights, how: Experts, grad_format: str
) -> Tensor:
    """Experts whose products are of FP8 values, all else exact."""
    w1, w2, b1, b2 = parameters
    out = torch.zeros_like(x)
    for e, (first, second) in enumerate(zip(how.first(w1), how.second(w2), strict=True)):
        token, place = (index == e).nonzero().unbind(1)
        z = _Product.apply(x[token].double(), first.double(), grad_format, False).to(x.dtype)
        gate, *up = (z if b1 is None else z + how.first(b1)[e]).chunk(1 + how.gated, 1)
        h = ACTIVATIONS[how.activation](gate.clamp(max=how.limit) if how.limit else gate)
        for part in up:
            h = h * ((part.clamp(-how.limit, how.limit) if how.limit else part) + how.shift)
        y = _Product.apply(h.double(), second.double(), grad_format, False).to(x.dtype)
        y = y if b2 is None else y + b2[e]
        out = out.index_add(0, token, y * weights[token, place, None].to(y.dtype))
    return out


def experts_in_fp8(module: Any, how: Experts, grad_format: str) -> None:
    """Let the experts of a module multiply FP8 values, all else exact, in place."""
    module.forward = functools.partial(experts_alone, parameters=weights_of(module), how=how, grad_format=grad_format)


def multiply_in_fp8(linears: list[nn.Module], grad_format: str, in_blocks: bool = False) -> None:
    """Let linear layers that read one input, in the order in which they are called, multiply FP8 values, in place."""
    members = [_Member.of(linear) for linear in linears]
    stack = _Stack(members, grad_format, in_blocks)
    for index, member in enumerate(members):
        member.stack = (stack, index)
