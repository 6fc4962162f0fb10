"""Every kernel of a decoder block, the loss and the optimizer, on a model's shape: what `bench kernels` times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from overcoat.bench.shapes import BlockShape, head_dim
from overcoat.kernels import (
    activation,
    activation_backward,
    adamw_step,
    blockwise,
    groups,
    loss,
    multi_tensor,
    norm,
    norm_backward,
    norm_quantize,
    quantize,
    rms_norm,
    rope,
    rope_backward,
    rope_quantize,
)
from overcoat.kernels import (
    weights as stack,
)
from overcoat.kernels.op import Op
from overcoat.optim.state import init_state

CODE, G = "sqrt8", 128
EPS = 1e-5


class KernelCase(NamedTuple):
    """One call of an op.

    also: what tells its name from other calls' of the op. untouched: bytes of its arguments that it does not read, or
    of mutated ones not write.
    """

    op: Op
    arguments: tuple[Any, ...]
    also: str = ""
    untouched: int = 0

    @property
    def name(self) -> str:
        return self.op.reference.__name__ + self.also

    def call(self) -> Any:
        return self.op(*self.arguments)

    def moved_bytes(self, result: Any) -> int:
        """Bytes that the call must move: all tensors it is given are read, all it mutates or returns are written."""
        schema = self.op._schema.arguments
        mutated = [
            argument
            for argument, declared in zip(self.arguments, schema, strict=False)
            if declared.alias_info is not None and declared.alias_info.is_write
        ]
        touched = tree_leaves([self.arguments, mutated, result])
        return sum(leaf.nbytes for leaf in touched if isinstance(leaf, Tensor)) - self.untouched


Cases = Iterator[KernelCase]


class Inputs:
    """Sizes of a block, and random tensors of them.

    tokens, hidden, width (of the MLP), heads, kv_heads, vocabulary; qkv: columns of q, k and v; head_dim.
    """

    def __init__(self, shape: BlockShape, device: str) -> None:
        config = shape.model.config().get_text_config()
        self.device, self.tokens, self.sequence = device, shape.tokens, shape.sequence
        self.hidden, self.width, self.vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
        self.heads, self.head_dim = config.num_attention_heads, head_dim(config)
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.qkv = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def x(self, columns: int = 0) -> Tensor:
        """(tokens, hidden or `columns`)."""
        return self.normal(self.tokens, columns or self.hidden)

    def gradients(self) -> list[Tensor]:
        """Of q, k and v."""
        return [self.x(columns) for columns in self.qkv]

    def weights(self) -> list[Tensor]:
        """Of q, k and v."""
        return [self.normal(rows, self.hidden) for rows in self.qkv]

    def tables(self) -> tuple[Tensor, Tensor]:
        """In place of cos and sin."""
        return self.normal(self.sequence, self.head_dim), self.normal(self.sequence, self.head_dim)

    def scalar(self, value: float) -> Tensor:
        return torch.tensor(value, device=self.device)


def quantize_cases(of: Inputs) -> Cases:
    """Layouts, weights, groups."""
    x, scale, weights = of.x(), of.scalar(0.01), of.weights()
    top = quantize.amax(x)
    codes, group_amax = groups.group_encode(x, CODE, G)
    weight_top = stack.quantize_weights(weights)[2]
    yield KernelCase(quantize.amax, (x,))
    yield KernelCase(quantize.quantize, (x, top, "e4m3"))
    yield KernelCase(quantize.quantize_both, (x, top, "e5m2"))
    yield KernelCase(quantize.quantize_t, (x, scale, "e4m3"))
    yield KernelCase(stack.quantize_weights, (weights,))
    yield KernelCase(stack.stack_weights, (weights, weight_top, False))
    yield KernelCase(stack.stack_weights, (weights, weight_top, True), "^T")
    codes8 = [quantize.quantize(weight, weight_top, "e4m3")[0] for weight in weights]
    yield KernelCase(stack.stack_codes, (codes8, False))
    yield KernelCase(stack.stack_codes, (codes8, True), "^T")
    yield KernelCase(groups.group_encode, (x, CODE, G))
    yield KernelCase(groups.group_decode, (codes, group_amax, CODE, G, x.dtype))
    yield KernelCase(blockwise.requantize_t, (codes, group_amax, of.normal(of.hidden), None, scale, CODE, G))


def norm_cases(of: Inputs) -> Cases:
    """RMSNorm forward and backward, alone and with the residual's addition; LayerNorm's; the model's last."""
    x, dy, dresidual = of.x(), of.x(), of.x()
    weight, bias = of.normal(of.hidden), of.normal(of.hidden)
    rms, layer = (weight, None, EPS, False), (weight, bias, EPS, True)
    rstd, row_amax = norm.norm_stats(x, None, *rms)
    forward = (x, None, rstd, weight, None, quantize.amax(row_amax), CODE, G)
    _, _, codes, group_amax = norm_quantize.norm_quantize(*forward)
    backward = (dy, codes, group_amax, rstd, weight, dresidual)
    for name, how in (("", rms), (" LayerNorm", layer)):
        yield KernelCase(norm.norm_stats, (x, None, *how), name)
        yield KernelCase(norm.norm_stats, (dy, x, *how), f" of a sum{name}")
    yield KernelCase(norm_quantize.norm_quantize, forward)
    yield KernelCase(norm_backward.norm_backward, (*backward, False, False, CODE, G))
    yield KernelCase(norm_backward.norm_backward, (*backward, True, True, CODE, G), " LayerNorm")
    yield KernelCase(norm.add_norm_encode, (dy, x, *rms, CODE, G))
    yield KernelCase(rms_norm.rms_norm, (x, weight, EPS))
    yield KernelCase(rms_norm.rms_norm_backward, (dy, x, rstd, weight))


def rope_cases(of: Inputs) -> Cases:
    """Rotation, forward and backward; with head norms as Qwen3 has them. In place, v is read but not written."""
    qkv, tables, gradients, weight = of.x(sum(of.qkv)), of.tables(), of.gradients(), of.normal(of.head_dim)
    center, of_v = groups.token_center(qkv[:, -of.qkv[2] :]), gradients[2].nbytes
    plain = (*tables, None, None, 0.0, of.heads, of.kv_heads)
    normed = (*tables, weight, weight, EPS, of.heads, of.kv_heads)
    kept = rope.qk_rope_encode12_(qkv, center, *plain, CODE)[:3]
    top, _ = rope_quantize.qk_rope_backward_amax(*gradients, *tables, of.heads, False)
    yield KernelCase(rope.qk_rope_encode12_, (qkv, center, *plain, CODE), untouched=of_v)
    decode = (*kept, center, *tables, of.heads, of.kv_heads, CODE, torch.bfloat16)
    yield KernelCase(rope.qk_rope_decode12, decode)
    yield KernelCase(rope_quantize.qk_rope_backward_amax, (*gradients, *tables, of.heads, False))
    yield KernelCase(rope_quantize.qk_rope_backward_amax, (*gradients, *tables, of.heads, True), " and sums")
    yield KernelCase(rope_quantize.qk_rope_backward_quantize, (*gradients, *tables, top, "e5m2", of.heads))
    yield KernelCase(rope.qk_rope, (qkv, *plain))
    yield KernelCase(rope_backward.qk_rope_backward, (*gradients, None, *plain[:-1]))
    yield KernelCase(rope.qk_rope_encode12_, (qkv, center, *normed, CODE), " norm", of_v)
    # The backward decodes first: head norms' gradients need what came before them.
    yield KernelCase(rope.qk_rope, (qkv, *normed), " norm")
    # Of qkv it reads q and k.
    yield KernelCase(rope_backward.qk_rope_backward, (*gradients, qkv, *normed[:-1]), " norm", of_v)


def activation_cases(of: Inputs) -> Cases:
    """The MLP's activation, forward and backward: SwiGLU, and GELU with biases, with one scale and in blocks."""
    dh = of.x(of.width)
    for name, function, gated in (("swiglu", "silu", True), ("gelu", "gelu", False), ("gelu_tanh", "gelu_tanh", False)):
        z, how, has_bias = of.x((1 + gated) * of.width), (function, CODE, G), not gated
        encode = (z, function, gated, CODE, G)
        codes, group_amax, top = activation.activation_encode(*encode)
        _, scale = activation.activation_quantize(z, top, function, gated)
        kept, first = (dh, codes, group_amax), (dh, group_amax, function, G)
        bound = activation_backward.activation_gradient_bound(*first)
        backward = activation_backward.activation_backward
        yield KernelCase(activation.activation_encode, encode, f" {name}")
        yield KernelCase(activation.activation_quantize, (z, top, function, gated), f" {name}")
        yield KernelCase(activation.activation_decode, (*kept[1:], *how, dh.dtype), f" {name}")
        yield KernelCase(activation_backward.activation_gradient_bound, first, f" {name}")
        yield KernelCase(backward, (*kept, scale, None, None, False, *how), f" {name}")
        yield KernelCase(backward, (*kept, scale, bound, "e5m2", has_bias, *how), f" to FP8 {name}")
        yield KernelCase(activation.activation_block_quantize, encode, f" {name}")
        yield KernelCase(backward, (*kept, None, None, None, False, *how), f" blocks {name}")


def blockwise_cases(of: Inputs) -> Cases:
    """The same work with 1x128 and 128x128 scales."""
    x, weight, weights = of.x(), of.normal(of.hidden), of.weights()
    codes, group_amax = groups.group_encode(x, CODE, G)
    how = (weight, None, EPS, False, CODE, G)
    yield KernelCase(blockwise.block_quantize, (x, "e4m3"))
    yield KernelCase(blockwise.block_quantize_both, (x, "e5m2"))
    yield KernelCase(blockwise.block_quantize_t, (x, "e4m3"))
    yield KernelCase(blockwise.block_requantize_t, (codes, group_amax, weight, None, CODE, G))
    yield KernelCase(stack.block_stack_weights, (weights, False))
    yield KernelCase(stack.block_stack_weights, (weights, True), "^T")
    yield KernelCase(norm.norm_block_quantize, (x, None, *how))
    yield KernelCase(norm.norm_block_quantize, (x, of.x(), *how), " of a sum")


def loss_cases(of: Inputs) -> Cases:
    """The loss on one chunk of logits."""
    rows = loss.chunk_rows(of.tokens, of.vocabulary, torch.bfloat16.itemsize)
    labels = torch.randint(of.vocabulary, (rows,), device=of.device)
    yield KernelCase(loss.cross_entropy_, (of.normal(rows, of.vocabulary), labels, -100, 0.0, True))


def optimizer_cases(of: Inputs) -> Cases:
    """AdamW's step of one block's weights, and the sum of its gradients' squares."""
    sizes = [(rows, of.hidden) for rows in (*of.qkv, of.width, of.width)]
    sizes += [(of.hidden, of.qkv[0]), (of.hidden, of.width)]
    params, grads = ([of.normal(*size) for size in sizes] for _ in range(2))
    moments, master = ("sqrt8", "log8"), "bf16+8"
    group = {"moments": moments, "group_size": G, "master": master}
    states = [init_state(param, group) for param in params]
    tensors = [state[name] for name in states[0] for state in states]
    scalars = (of.scalar(1e-4), of.scalar(1.0), of.scalar(False))
    options = (0.9, 0.95, 1e-8, 0.1, *moments, master, G)
    numbers = list(range(len(params)))
    step = (params, grads, tensors, *scalars, *options, numbers, [0] * len(params))
    yield KernelCase(adamw_step.adamw_step_, step)
    yield KernelCase(multi_tensor.gradients_sum_squares, (grads,))


FAMILIES: dict[str, Callable[[Inputs], Cases]] = {
    "quantize": quantize_cases,
    "norm": norm_cases,
    "rope": rope_cases,
    "activation": activation_cases,
    "blockwise": blockwise_cases,
    "loss": loss_cases,
    "optimizer": optimizer_cases,
}
