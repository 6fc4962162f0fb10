"""A whole decoder block as one autograd node: gradients pass between its ops in FP8, and it may checkpoint itself.

Ops that are neighbours in a block can save passes over memory that separate autograd nodes cannot: the gradients of
gate and up, and of q, k and v, are written straight into the two FP8 layouts that the products read, and never exist in
16 bits; q and k are rotated in place.

With `Recipe.checkpoint = "block"` the forward keeps the block's input in 8-bit groups (0.5 U) and a few scalars: the
weights' maxima and the scale of the MLP's product. The backward decodes the input, runs the forward again up to gate
and up, and then the ops' backwards in reverse. Cheaper than `torch.utils.checkpoint`, which keeps 1 U, finds all
maxima again, and computes the block's result a second time only to throw it away.

With `Recipe.offload_blocks` what the forward keeps waits in host memory (offload.py).

The ops' pure functions are called here without autograd, so this file is also the shortest description of how data and
gradients flow through a block.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overcoat.kernels.groups import group_decode, group_encode
from overcoat.memory import keep_parts, release_saved
from overcoat.ops.attention import (
    AttentionKept,
    Heads,
    Rotary,
    attention_decode,
    attention_forward,
    qkv_gradient,
    qkv_gradient_quantized,
    rotated_gradients,
)
from overcoat.ops.linear import (
    LinearResidualKept,
    Norm,
    NormLinearKept,
    add_norm_linear_forward,
    input_norm_backward,
    linear_forward,
    norm_linear_forward,
    normed_product_backward,
    rebuild_input_t,
)
from overcoat.ops.mlp import MlpSaved, mlp_backward, mlp_forward, mlp_recompute
from overcoat.ops.offload import run_block
from overcoat.ops.parameters import Block, from_parameters, parameters_of
from overcoat.ops.products import Gradient, LinearGrads, product_backward
from overcoat.recipe import Recipe


class BlockKept(NamedTuple):
    """What all ops of a block keep."""

    qkv: NormLinearKept
    attention: AttentionKept
    o: LinearResidualKept
    gate_up: NormLinearKept
    down: MlpSaved


class Scales(NamedTuple):
    """What a forward has found and its recomputation need not find again; None where unknown (or with block scales).

    Maxima of the weights, 0-d; the MLP product's scale.
    """

    qkv: Optional[Tensor] = None
    o: Optional[Tensor] = None
    gate_up: Optional[Tensor] = None
    down: Optional[Tensor] = None
    product: Optional[Tensor] = None


def block_forward(x: Tensor, block: Block, rotary: Rotary, heads: Heads, recipe: Recipe) -> tuple[Tensor, BlockKept]:
    """x (T, H) -> x (T, H), and what the ops keep."""
    x, gate_up, kept = _to_gate_up(x, block, rotary, heads, recipe, Scales())
    x, kept_down = mlp_forward(gate_up, *block.down, x, *_activation(block), recipe)
    return x, BlockKept(*kept, kept_down)


def block_again(x: Tensor, block: Block, rotary: Rotary, heads: Heads, recipe: Recipe, scales: Scales) -> BlockKept:
    """What `block_forward` keeps, once more; attention's tensors in 16 bits, since its backward comes at once and would
    only have to run attention yet again."""
    recipe = dataclasses.replace(recipe, kept_attention="bf16")
    _, gate_up, kept = _to_gate_up(x, block, rotary, heads, recipe, scales)
    return BlockKept(*kept, mlp_recompute(gate_up, scales.product, scales.down, *_activation(block), recipe))


def _activation(block: Block) -> tuple[str, bool]:
    """The MLP's activation by name, and whether it is gated."""
    if block.gelu is None:
        return "silu", True
    return {"none": "gelu", "tanh": "gelu_tanh"}[block.gelu], False


def _to_gate_up(
    x: Tensor, block: Block, rotary: Rotary, heads: Heads, recipe: Recipe, scales: Scales
) -> tuple[Tensor, Tensor, tuple[NormLinearKept, AttentionKept, LinearResidualKept, NormLinearKept]]:
    """The residual stream before the MLP, the projections gate and up, and what four ops keep on the way."""
    qkv, kept_qkv = norm_linear_forward(x, block.attention_norm, *block.qkv, recipe, scales.qkv)
    o, o_amax, kept_attention = attention_forward(qkv, rotary, heads, recipe, in_place=True)
    del qkv  # 3 U in 16 bits, as long as somebody knows them
    y, kept_o = linear_forward(o, block.o.weight, block.o.bias, x.dtype, recipe, o_amax, scales.o)
    x, gate_up, kept_gate_up = add_norm_linear_forward(y, x, block.mlp_norm, *block.gate_up, recipe, scales.gate_up)
    return x, gate_up, (kept_qkv, kept_attention, kept_o, kept_gate_up)


class Wanted(NamedTuple):
    """Which weight gradients are wanted (frozen weights have none); the names of `Block`'s products."""

    qkv: bool = True
    o: bool = True
    gate_up: bool = True
    down: bool = True


def block_backward(
    dx: Tensor,
    kept: list[Any],
    block: Block,
    rotary: Rotary,
    heads: Heads,
    recipe: Recipe,
    wanted: Wanted = Wanted(),  # noqa: B008
) -> tuple[Tensor, list[Optional[Tensor]]]:
    """Gradients of the block's input and of its parameters, in the order of `parameters_of`.

    Gradients between the ops go straight into FP8, except where a head norm reads them too, or with block scales the
    biases of q, k and v do.

    kept: `BlockKept` as a list. It is emptied from its end: what an op has kept is free when the op's gradients are
    there, and so are these when the op before has read them. At its fullest moment a block's backward holds 17 U (in
    Llama-2-7B, at 4 x 2048 tokens, gradients of its weights among them); if all lived to the end, it would be 29.
    """
    dgate_up, down = _mlp_backward(dx, kept.pop(), block, recipe, wanted.down)
    part = kept.pop()
    gate_up = normed_product_backward(dgate_up, part, block.mlp_norm, *block.gate_up, recipe, wanted.gate_up)
    del dgate_up
    dx, dmlp_norm, dmlp_norm_bias, dx_amax = input_norm_backward(gate_up.dx, dx, part, block.mlp_norm, recipe)
    gate_up, part = gate_up._replace(dx=None), None
    o, dqkv, dq_weight, dk_weight = _attention_backward(dx, dx_amax, kept, block, rotary, heads, recipe, wanted.o)
    part = kept.pop()
    qkv = normed_product_backward(dqkv, part, block.attention_norm, *block.qkv, recipe, wanted.qkv)
    del dqkv
    dx, dnorm, dnorm_bias, _ = input_norm_backward(qkv.dx, dx, part, block.attention_norm, recipe)
    no_gate = (None,) if block.gate is None else ()
    weights = (*qkv.dweights, *o.dweights, *no_gate, *gate_up.dweights, *down.dweights)
    biases = (*qkv.dbiases, *o.dbiases, *no_gate, *gate_up.dbiases, *down.dbiases)
    norms = [dnorm, dnorm_bias, dmlp_norm, dmlp_norm_bias, dq_weight, dk_weight]
    return dx, [*norms, *weights, *biases]


def _mlp_backward(
    dx: Tensor, kept: MlpSaved, block: Block, recipe: Recipe, want_weight: bool
) -> tuple[Tensor | Gradient, LinearGrads]:
    has_bias = any(bias is not None for bias in block.gate_up[1])
    return mlp_backward(
        dx, kept, *block.down, *_activation(block), recipe,
        quantized=True, into_has_bias=has_bias, want_weight=want_weight,
    )  # fmt: skip


def _attention_backward(
    dx: Tensor,
    dx_amax: Tensor,
    kept: list[Any],
    block: Block,
    rotary: Rotary,
    heads: Heads,
    recipe: Recipe,
    want_weight: bool,
) -> tuple[LinearGrads, Tensor | Gradient, Optional[Tensor], Optional[Tensor]]:
    """Gradients of the output projection, of qkv and of the q/k norm weights; what both have kept, the last two of
    `kept`, is taken from it."""
    kept_o, decoded = kept.pop(), attention_decode(kept.pop(), rotary, heads, recipe, dx.dtype)
    o_t = rebuild_input_t(decoded.o, kept_o.x_scale) if want_weight else None
    o = product_backward(dx, o_t, [block.o.weight], [block.o.bias], kept_o.w_amax, recipe, dx_amax)
    del o_t
    assert o.dx is not None
    gradients, inputs = rotated_gradients(o.dx, decoded, rotary.mask, heads), decoded.inputs
    o = o._replace(dx=None)
    del decoded
    if rotary.q_weight is not None or rotary.k_weight is not None:
        return o, *qkv_gradient(gradients, inputs, rotary, heads)
    return o, qkv_gradient_quantized(gradients, rotary, heads, block.qkv[1], recipe), None, None


# The first tensors that a block saves are not its own: cos, sin, mask and its 20 parameters.
NUM_INPUTS = 23
# What each op of a block keeps, in the order of `BlockKept`.
_KINDS = (NormLinearKept, AttentionKept, LinearResidualKept, NormLinearKept, MlpSaved)


def _op_names(block: Block) -> tuple[str, ...]:
    """The ops as the memory report names them, in the order of `BlockKept`."""
    mlp = "swiglu_linear" if block.gelu is None else "gelu_linear"
    return "norm_linear", "attention", "linear_residual", "norm_linear", mlp


def _kept_from(tensors: Sequence[Any]) -> BlockKept:
    """`BlockKept` from the flat list of its tensors."""
    parts: list[Any] = []
    first = 0
    for kind in _KINDS:
        last = first + len(kind._fields)
        parts.append(kind(*tensors[first:last]))
        first = last
    return BlockKept(*parts)


def _recompute(
    tensors: Sequence[Any], block: Block, rotary: Rotary, heads: Heads, recipe: Recipe, dtype: torch.dtype
) -> BlockKept:
    """`BlockKept` from the tensors that a checkpointed block keeps: its input in 8 bits, `Scales`."""
    x = group_decode(*tensors[:2], None, recipe.kept_format, recipe.group_size, dtype)
    return block_again(x, block, rotary, heads, recipe, Scales(*tensors[2:]))


class _Block(torch.autograd.Function):
    """A whole block; keeps what its ops keep, or with `Recipe.checkpoint` its input in 8 bits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Optional[Tensor],
        constants: tuple[tuple[Norm, Norm], Optional[str]],
        heads: Heads,
        recipe: Recipe,
        *flat: Optional[Tensor],
    ) -> Tensor:
        block, shape = from_parameters(flat, *constants), x.shape
        x = x.contiguous().flatten(0, -2)
        y, kept = block_forward(x, block, Rotary(cos, sin, mask, flat[4], flat[5]), heads, recipe)
        ctx.constants, ctx.heads, ctx.recipe, ctx.dtype = constants, heads, recipe, x.dtype
        inputs = {"cos": cos, "sin": sin, "mask": mask, **{f"parameter{i}": p for i, p in enumerate(flat)}}
        if recipe.checkpoint == "block":
            codes, group_amax = group_encode(x, None, recipe.kept_format, recipe.group_size)
            scales = Scales(kept.qkv.w_amax, kept.o.w_amax, kept.gate_up.w_amax, kept.down.w_amax, kept.down.h_scale)
            kept_input = {"codes": codes, "group_amax": group_amax}
            keep_parts(ctx, ("block", inputs), ("block", kept_input), ("block", scales._asdict()))
        else:
            ops: Sequence[Any] = kept
            parts = [(op, part._asdict()) for op, part in zip(_op_names(block), ops, strict=True)]
            keep_parts(ctx, ("block", inputs), *parts)
        # Not a view, whose hooks are lost when somebody changes it in place: FSDP2 warns of such results.
        return y if y.shape == shape else torch.ops.aten._unsafe_view(y, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Optional[Tensor], ...]:
        saved = ctx.saved_tensors
        release_saved(ctx)
        (cos, sin, mask), flat, tensors = saved[:3], saved[3:NUM_INPUTS], saved[NUM_INPUTS:]
        recipe, block = ctx.recipe, from_parameters(flat, *ctx.constants)
        rotary = Rotary(cos, sin, mask, flat[4], flat[5])
        if recipe.checkpoint == "block":
            kept = list(_recompute(tensors, block, rotary, ctx.heads, recipe, ctx.dtype))
        else:
            kept = list(_kept_from(tensors))
        del saved, tensors  # `block_backward` lets go of what it has read
        weights = ctx.needs_input_grad[7 + 6 : 7 + 13]
        wanted = Wanted(any(weights[:3]), weights[3], any(weights[4:6]), weights[6])
        dx, grads = block_backward(dy.contiguous().flatten(0, -2), kept, block, rotary, ctx.heads, recipe, wanted)
        return (dx.view(dy.shape), None, None, None, None, None, None, *grads)


def decoder_block(
    x: Tensor, block: Block, rotary: Rotary, heads: Heads, recipe: Recipe, offload: Optional[bool] = None
) -> Tensor:
    """One decoder block on tokens x (T, H) or (B, S, H) as one autograd node; the result has x's shape.

    Computes what the five ops in a row compute, with gradients between them handed on in FP8. Keeps what they keep
    (5.8 U in Llama-2-7B), or with `Recipe.checkpoint = "block"` 0.5 U, and recomputes the rest.

    offload: whether it keeps that in host memory; None in a model of which no block does.

    Raises:
        ValueError: no tokens, or tables that the kernels' 32-bit offsets do not reach.
    """
    if not x.numel():
        raise ValueError(f"a block's input has the shape {tuple(x.shape)}: leave batches without tokens out")
    if max(rotary.cos.numel(), rotary.sin.numel()) >= 2**31:
        raise ValueError(f"cos and sin have the shape {tuple(rotary.cos.shape)}: give them fewer than 2^31 elements")
    first, second = (norm._replace(weight=None, bias=None) for norm in block[:2])
    constants = (first, second), block.gelu
    parameters = parameters_of(block, rotary)
    run = functools.partial(_Block.apply, x, *rotary[:3], constants, heads, recipe, *parameters)
    # Neither the compiler nor a captured graph knows of the copies.
    if offload is None or torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return run()
    return run_block(run, NUM_INPUTS, offload)
