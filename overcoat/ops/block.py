"""A whole decoder block that keeps one 8-bit copy of its input: `Recipe.checkpoint = "block"`.

The forward runs the block's ops and keeps nothing of them but the block's input in 8-bit groups (0.5 U). The backward
decodes it, runs the forward's ops again up to the MLP's gate and up (the down projection's result is not needed), and
then their backwards in reverse. Cheaper than `torch.utils.checkpoint`, which keeps 1 U and recomputes everything.

The ops' pure functions are called here without autograd, so this file is also the shortest description of how data and
gradients flow through a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.kernels.quantize import group_decode, group_encode
from overcoat.memory import keep
from overcoat.ops.attention import AttentionKept, Heads, Rotary, attention_backward, attention_forward
from overcoat.ops.linear import (
    LinearResidualKept,
    Norm,
    NormLinearKept,
    linear_residual_forward,
    norm_linear_backward,
    norm_linear_forward,
    product_backward,
    rebuild_input_t,
)
from overcoat.ops.mlp import SwigluLinearKept, swiglu_linear_backward, swiglu_linear_forward
from overcoat.recipe import Recipe


class Linear(NamedTuple):
    """A linear layer's parameters: weight (N, K), bias (N,) or None."""

    weight: Tensor
    bias: Optional[Tensor]


class Block(NamedTuple):
    """The parameters of a Llama-shaped block."""

    attention_norm: Norm
    mlp_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear
    up: Linear
    down: Linear

    @property
    def qkv(self) -> tuple[list[Tensor], list[Optional[Tensor]]]:
        """Weights and biases that read the attention norm's output."""
        return _unzip(self.q, self.k, self.v)

    @property
    def gate_up(self) -> tuple[list[Tensor], list[Optional[Tensor]]]:
        """Weights and biases that read the MLP norm's output."""
        return _unzip(self.gate, self.up)


def _unzip(*layers: Linear) -> tuple[list[Tensor], list[Optional[Tensor]]]:
    return [layer.weight for layer in layers], [layer.bias for layer in layers]


class BlockKept(NamedTuple):
    """What all ops of a block keep."""

    qkv: NormLinearKept
    attention: AttentionKept
    o: LinearResidualKept
    gate_up: NormLinearKept
    down: SwigluLinearKept


def block_forward(x: Tensor, block: Block, rotary: Rotary, heads: Heads, recipe: Recipe) -> tuple[Tensor, BlockKept]:
    """x (T, H) -> x (T, H), and what the ops keep."""
    qkv, kept_qkv = norm_linear_forward(x, block.attention_norm, *block.qkv, recipe)
    o, kept_attention = attention_forward(qkv, rotary, heads, recipe)
    x, kept_o = linear_residual_forward(o, block.o.weight, block.o.bias, x)
    gate_up, kept_gate_up = norm_linear_forward(x, block.mlp_norm, *block.gate_up, recipe)
    x, kept_down = swiglu_linear_forward(gate_up, block.down.weight, block.down.bias, x, recipe)
    return x, BlockKept(kept_qkv, kept_attention, kept_o, kept_gate_up, kept_down)


def block_backward(
    dx: Tensor, kept: BlockKept, block: Block, rotary: Rotary, heads: Heads, recipe: Recipe
) -> tuple[Tensor, list[Optional[Tensor]]]:
    """Gradients of the block's input and of its parameters, in the order of `_parameters`."""
    dgate_up, down = swiglu_linear_backward(dx, kept.down, block.down.weight, block.down.bias, recipe)
    dx, dmlp_norm, dmlp_norm_bias, gate_up = norm_linear_backward(
        dgate_up, dx, kept.gate_up, block.mlp_norm, *block.gate_up, recipe
    )
    o_t = rebuild_input_t(kept.attention.o, kept.attention.encoded_o, kept.o.x_scale, recipe)
    o = product_backward(dx, o_t, kept.o.x_scale, [block.o.weight], [block.o.bias], kept.o.w_amax, recipe)
    assert o.dx is not None
    dqkv, dq_weight, dk_weight = attention_backward(o.dx, kept.attention, rotary, heads, recipe)
    dx, dnorm, dnorm_bias, qkv = norm_linear_backward(dqkv, dx, kept.qkv, block.attention_norm, *block.qkv, recipe)
    weights = (*qkv.dweights, *o.dweights, *gate_up.dweights, *down.dweights)
    biases = (*qkv.dbiases, *o.dbiases, *gate_up.dbiases, *down.dbiases)
    norms = [dnorm, dnorm_bias, dmlp_norm, dmlp_norm_bias, dq_weight, dk_weight]
    return dx, [*norms, *weights, *biases]


def _parameters(block: Block, rotary: Rotary) -> list[Optional[Tensor]]:
    """All parameters as one flat list: norms, q/k norms, weights, biases."""
    linears = block[2:]
    norms = [block.attention_norm, block.mlp_norm]
    flat = [tensor for norm in norms for tensor in (norm.weight, norm.bias)]
    weights, biases = _unzip(*linears)
    return [*flat, rotary.q_weight, rotary.k_weight, *weights, *biases]


def _from_parameters(flat: tuple[Any, ...], norms: tuple[Norm, Norm]) -> Block:
    """Undo `_parameters` with the tensors that autograd hands back; `norms` gives the norms' constants."""
    first, second = norms[0]._replace(weight=flat[0], bias=flat[1]), norms[1]._replace(weight=flat[2], bias=flat[3])
    return Block(first, second, *(Linear(w, b) for w, b in zip(flat[6:13], flat[13:20], strict=True)))


class _CheckpointedBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Optional[Tensor],
        constants: tuple[Norm, Norm],
        heads: Heads,
        recipe: Recipe,
        *flat: Optional[Tensor],
    ) -> Tensor:
        block = _from_parameters(flat, constants)
        y, _ = block_forward(x, block, Rotary(cos, sin, mask, flat[4], flat[5]), heads, recipe)
        codes, group_amax = group_encode(x, None, recipe.kept_format, recipe.group_size)
        ctx.constants, ctx.heads, ctx.recipe, ctx.dtype = constants, heads, recipe, x.dtype
        parameters = {f"parameter{i}": p for i, p in enumerate(flat)}
        keep(ctx, "block", codes=codes, group_amax=group_amax, cos=cos, sin=sin, mask=mask, **parameters)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        codes, group_amax, cos, sin, mask, *flat = ctx.saved_tensors
        recipe = ctx.recipe
        block = _from_parameters(tuple(flat), ctx.constants)
        rotary = Rotary(cos, sin, mask, flat[4], flat[5])
        x = group_decode(codes, group_amax, None, recipe.kept_format, recipe.group_size, ctx.dtype)
        _, kept = block_forward(x, block, rotary, ctx.heads, recipe)
        dx, grads = block_backward(dy, kept, block, rotary, ctx.heads, recipe)
        return (dx, None, None, None, None, None, None, *grads)


def checkpointed_block(x: Tensor, block: Block, rotary: Rotary, heads: Heads, recipe: Recipe) -> Tensor:
    """One Llama-shaped block on tokens x (T, H) that keeps 0.5 U and recomputes the rest in the backward."""
    constants = tuple(norm._replace(weight=None, bias=None) for norm in block[:2])
    return _CheckpointedBlock.apply(
        x, rotary.cos, rotary.sin, rotary.mask, constants, heads, recipe, *_parameters(block, rotary)
    )
