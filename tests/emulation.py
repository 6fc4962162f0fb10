"""The same model with FP8 GEMMs alone: every other tensor exact, in FP64.

`emulate_fp8_gemms(model)` replaces each group of linear layers that read one input (q, k, v; o; gate, up; down) by an
FP64 product of quantized operands: E4M3 per tensor for input and (stacked) weights, the recipe's format for the output
gradient. That is the error floor of any FP8 trainer; what Overcoat adds by keeping 8-bit tensors is held against it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from overcoat.formats import E4M3, FLOAT8, Float8, quantize_tensor


def sqnr(reference: Tensor, value: Tensor) -> float:
    """Signal to quantization noise, in dB."""
    reference, value = reference.detach().double(), value.detach().double()
    noise = (reference - value).norm()
    return float(20 * torch.log10(reference.norm() / noise.clamp_min(1e-300)))


def rounded(x: Tensor, fmt: Float8) -> Tensor:
    """x as FP8 with one scale for the tensor, back in FP64."""
    data, scale = quantize_tensor(x, fmt)
    return data.double() * scale.double()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, grad_format):
        x8, weight8 = rounded(x, E4M3), rounded(weight, E4M3)
        ctx.save_for_backward(x8, weight8)
        ctx.grad_format = grad_format
        return x8 @ weight8.t()

    @staticmethod
    def backward(ctx, dy):
        x8, weight8 = ctx.saved_tensors
        dy8 = rounded(dy, FLOAT8[ctx.grad_format])
        return dy8 @ weight8, dy8.t() @ x8, None


class _Stack:
    """Linear layers with one input: computed together when the first is called, handed out one by one."""

    def __init__(self, layers: list[nn.Linear], grad_format: str) -> None:
        self.layers, self.grad_format, self.outputs = layers, grad_format, {}

    def __call__(self, index: int, x: Tensor) -> Tensor:
        if index == 0:
            weight = torch.cat([layer.weight for layer in self.layers])
            y = _Product.apply(x.flatten(0, -2), weight, self.grad_format).unflatten(0, x.shape[:-1])
            self.outputs = dict(enumerate(y.split([layer.out_features for layer in self.layers], -1)))
        y, bias = self.outputs.pop(index), self.layers[index].bias
        return y if bias is None else y + bias


class _Member(nn.Linear):
    """A linear layer that asks its stack; holds the parameters under their own names."""

    @classmethod
    def of(cls, layer: nn.Linear) -> _Member:
        layer.__class__ = cls
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return self.stack[0](self.stack[1], x)


STACKS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def emulate_fp8_gemms(model: nn.Module, grad_format: str = "e5m2") -> nn.Module:
    """A copy of `model` in FP64 whose decoder layers' linear layers multiply FP8 values; all else exact."""
    model = copy.deepcopy(model).double()
    for layer in model.model.layers:
        for names in STACKS:
            members = [_Member.of(layer.get_submodule(name)) for name in names]
            stack = _Stack(members, grad_format)
            for index, member in enumerate(members):
                member.stack = (stack, index)
    return model
