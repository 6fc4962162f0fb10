"""Every kernel of a decoder block, the loss and the optimizer, called on a model's shape: what `bench kernels` times.

Legend: T tokens, H hidden, I intermediate, D head width, V vocabulary, G group size of kept codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from overcoat.bench.shapes import BlockShape
from overcoat.kernels import (
    activation,
    activation_backward,
    activation_blockwise,
    activation_bound,
    adamw,
    block_weights,
    blockwise,
    groups,
    loss,
    norm,
    norm_after,
    norm_backward,
    norm_blockwise,
    quantize,
    rms_norm,
    rope,
    rope_backward,
    rope_blockwise,
    rope_quantize,
    stack,
    stack_predicted,
)
from overcoat.kernels.op import Op
from overcoat.optim.state import STATE_LISTS, init_state

CODE, G = "sqrt8", 128
EPS = 1e-5


class KernelCase(NamedTuple):
    """One call of an op. `untouched`: bytes of its arguments that it does not read, or of mutated ones not write."""

    name: str
    op: Op
    arguments: tuple[Any, ...]
    untouched: int = 0

    def call(self) -> Any:
        return self.op(*self.arguments)

    def moved_bytes(self, result: Any) -> int:
        """Bytes that the call must move: all tensors it is given are read, all it mutates or returns are written."""
        read = sum(_bytes(argument) for argument in self.arguments)
        schema = self.op.overload._schema.arguments
        mutated = sum(
            _bytes(argument)
            for argument, declared in zip(self.arguments, schema, strict=False)
            if declared.alias_info is not None and declared.alias_info.is_write
        )
        return read + mutated - self.untouched + _bytes(result)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _normal(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _widths(shape: BlockShape) -> tuple[int, int, int]:
    """Columns of q, k and v."""
    model = shape.model
    return model.heads * model.head_dim, model.kv_heads * model.head_dim, model.kv_heads * model.head_dim


def _tables(shape: BlockShape, device: str) -> tuple[Tensor, Tensor]:
    """In place of cos and sin."""
    return tuple(_normal(device, shape.sequence, shape.model.head_dim) for _ in range(2))  # type: ignore[return-value]


def quantize_cases(shape: BlockShape, device: str) -> Iterator[KernelCase]:
    """Layouts, weights, groups. The sample that is the center leaves most rows out."""
    tokens, hidden = shape.tokens, shape.model.hidden
    x, norm_weight, scale = _normal(device, tokens, hidden), _normal(device, hidden), torch.tensor(0.01, device=device)
    weights = [_normal(device, rows, hidden) for rows in _widths(shape)]
    top, center = quantize.amax(x), groups.token_center(x)
    codes, group_amax = groups.group_encode(x, center, CODE, G)
    weight_top = stack.stack_amax(weights)
    yield KernelCase("amax", quantize.amax, (x,))
    yield KernelCase("quantize", quantize.quantize, (x, top, "e4m3"))
    yield KernelCase("quantize_both", quantize.quantize_both, (x, top, "e5m2"))
    yield KernelCase("quantize_t", quantize.quantize_t, (x, scale, "e4m3"))
    yield KernelCase("stack_amax", stack.stack_amax, (weights,))
    yield KernelCase("stack_weights", stack.stack_weights, (weights, weight_top, False))
    yield KernelCase("stack_weights^T", stack.stack_weights, (weights, weight_top, True))
    predicted = [quantize.amax(weight) for weight in weights]
    yield KernelCase("stack_weights_predicted", stack_predicted.stack_weights_predicted, (weights, predicted))
    left_out = x.nbytes - x[:: -(-tokens // groups.CENTER_ROWS)].nbytes
    yield KernelCase("token_center", groups.token_center, (x,), left_out)
    yield KernelCase("group_encode", groups.group_encode, (x, None, CODE, G))
    yield KernelCase("group_encode_amax", groups.group_encode_amax, (x, center, CODE, G))
    decode = (codes, group_amax, center, CODE, G, x.dtype)
    yield KernelCase("group_decode", groups.group_decode, decode)
    rebuild = (codes, group_amax, norm_weight, None, scale, CODE, G)
    yield KernelCase("requantize_t", groups.requantize_t, rebuild)


def norm_cases(shape: BlockShape, device: str) -> Iterator[KernelCase]:
    """RMSNorm forward and backward, alone and with the residual's addition; LayerNorm's; the model's last."""
    tokens, hidden = shape.tokens, shape.model.hidden
    x, dy, dresidual = (_normal(device, tokens, hidden) for _ in range(3))
    weight, bias = _normal(device, hidden), _normal(device, hidden)
    rstd, row_amax = norm.rmsnorm_stats(x, weight, EPS)
    top = quantize.amax(row_amax)
    forward = (x, None, rstd, weight, None, top, CODE, G)
    _, _, codes, group_amax = norm.norm_quantize(*forward)
    yield KernelCase("rmsnorm_stats", norm.rmsnorm_stats, (x, weight, EPS))
    yield KernelCase("add_rmsnorm_stats", norm.add_rmsnorm_stats, (dy, x, weight, EPS))
    yield KernelCase("layernorm_stats", norm.layernorm_stats, (x, weight, bias, EPS))
    yield KernelCase("add_layernorm_stats", norm.add_layernorm_stats, (dy, x, weight, bias, EPS))
    yield KernelCase("norm_quantize", norm.norm_quantize, forward)
    backward = (dy, codes, group_amax, rstd, weight, dresidual, False, False, CODE, G)
    yield KernelCase("norm_backward", norm_backward.norm_backward, backward)
    centered = (*backward[:6], True, True, CODE, G)
    yield KernelCase("norm_backward LayerNorm", norm_backward.norm_backward, centered)
    yield KernelCase("add_norm_encode", norm_after.add_norm_encode, (dy, x, weight, None, EPS, False, CODE, G))
    yield KernelCase("rms_norm", rms_norm.rms_norm, (x, weight, EPS))
    yield KernelCase("rms_norm_backward", rms_norm.rms_norm_backward, (dy, x, rstd, weight))


def rope_cases(shape: BlockShape, device: str) -> Iterator[KernelCase]:
    """Rotation, forward and backward; with head norms as Qwen3 has them. In place, v is read but not written."""
    tokens, heads, kv_heads = shape.tokens, shape.model.heads, shape.model.kv_heads
    qkv = _normal(device, tokens, sum(_widths(shape)))
    cos, sin = _tables(shape, device)
    gradients = tuple(_normal(device, tokens, width) for width in _widths(shape))
    dv, weight = gradients[2], _normal(device, shape.model.head_dim)
    center = groups.token_center(qkv[:, -_widths(shape)[2] :])
    tables = (cos, sin, None, None, 0.0, heads, kv_heads, CODE)
    kept = rope.qk_rope_encode12_(qkv, center, *tables)
    top = rope_quantize.qk_rope_backward_amax(*gradients, cos, sin, heads)
    yield KernelCase("qk_rope_encode12_", rope.qk_rope_encode12_, (qkv, center, *tables), dv.nbytes)
    decode = (*kept, center, cos, sin, heads, kv_heads, CODE, torch.bfloat16)
    yield KernelCase("qk_rope_decode12", rope.qk_rope_decode12, decode)
    yield KernelCase("qk_rope_backward_amax", rope_quantize.qk_rope_backward_amax, (*gradients, cos, sin, heads))
    yield KernelCase(
        "qk_rope_backward_amax_sums", rope_quantize.qk_rope_backward_amax_sums, (*gradients, cos, sin, heads)
    )
    backward = (*gradients, cos, sin, top, "e5m2", heads)
    yield KernelCase("qk_rope_backward_quantize", rope_quantize.qk_rope_backward_quantize, backward)
    plain, normed = (cos, sin, None, None, 0.0, heads, kv_heads), (cos, sin, weight, weight, EPS, heads, kv_heads)
    yield KernelCase("qk_rope", rope.qk_rope, (qkv, *plain))
    yield KernelCase("qk_rope_backward", rope_backward.qk_rope_backward, (*gradients, None, *plain[:-1]))
    yield KernelCase("qk_rope_encode12_ norm", rope.qk_rope_encode12_, (qkv, center, *normed, CODE), dv.nbytes)
    # The backward decodes first: head norms' gradients need what came before them.
    yield KernelCase("qk_rope norm", rope.qk_rope, (qkv, *normed))
    # Of qkv it reads q and k.
    yield KernelCase(
        "qk_rope_backward norm", rope_backward.qk_rope_backward, (*gradients, qkv, *normed[:-1]), dv.nbytes
    )


def activation_cases(shape: BlockShape, device: str) -> Iterator[KernelCase]:
    """The MLP's activation, forward and backward: SwiGLU, and GELU with biases, with one scale and in blocks."""
    tokens, width = shape.tokens, shape.model.intermediate
    dh = _normal(device, tokens, width)
    for name, function, gated in (("swiglu", "silu", True), ("gelu", "gelu", False), ("gelu_tanh", "gelu_tanh", False)):
        z, how, has_bias = _normal(device, tokens, (1 + gated) * width), (function, CODE, G), not gated
        encode = (z, function, gated, CODE, G)
        codes, group_amax, top = activation.activation_encode(*encode)
        _, scale = activation.activation_quantize(z, top, function, gated)
        kept, first = (dh, codes, group_amax), (dh, group_amax, function, G)
        bound = activation_bound.activation_gradient_bound(*first)
        calls: list[tuple[Op, tuple[Any, ...]]] = [
            (activation.activation_encode, encode),
            (activation.activation_quantize, (z, top, function, gated)),
            (activation_bound.activation_gradient_bound, first),
            (activation_backward.activation_backward, (*kept, scale, *how)),
            (activation_backward.activation_backward_quantize, (*kept, scale, bound, "e5m2", has_bias, *how)),
            (activation.activation_block_quantize, encode),
            (activation_blockwise.activation_block_backward, (*kept, *how)),
            (activation_blockwise.activation_block_backward_quantize, (*kept, "e5m2", has_bias, *how)),
        ]
        yield from (KernelCase(f"{op.name} {name}", op, arguments) for op, arguments in calls)


def blockwise_cases(shape: BlockShape, device: str) -> Iterator[KernelCase]:
    """The same work with 1x128 and 128x128 scales."""
    tokens, hidden = shape.tokens, shape.model.hidden
    x, weight = _normal(device, tokens, hidden), _normal(device, hidden)
    gradients = tuple(_normal(device, tokens, columns) for columns in _widths(shape))
    weights = [_normal(device, rows, hidden) for rows in _widths(shape)]
    codes, group_amax = groups.group_encode(x, None, CODE, G)
    yield KernelCase("block_quantize", blockwise.block_quantize, (x, "e4m3"))
    yield KernelCase("block_quantize_both", blockwise.block_quantize_both, (x, "e5m2"))
    yield KernelCase("block_quantize_t", blockwise.block_quantize_t, (x, "e4m3"))
    rebuild = (codes, group_amax, weight, None, CODE, G)
    yield KernelCase("block_requantize_t", blockwise.block_requantize_t, rebuild)
    yield KernelCase("block_stack_weights", block_weights.block_stack_weights, (weights, False))
    yield KernelCase("block_stack_weights^T", block_weights.block_stack_weights, (weights, True))
    yield KernelCase("norm_block_quantize", norm_blockwise.norm_block_quantize, (x, weight, None, EPS, False, CODE, G))
    residual = (x, _normal(device, tokens, hidden), weight, None, EPS, False, CODE, G)
    yield KernelCase("add_norm_block_quantize", norm_blockwise.add_norm_block_quantize, residual)
    rotation = (*gradients, *_tables(shape, device), "e5m2", shape.model.heads)
    yield KernelCase("qk_rope_block_backward", rope_blockwise.qk_rope_block_backward, rotation)


def loss_cases(shape: BlockShape, device: str) -> Iterator[KernelCase]:
    """The loss on one chunk of logits, and a gradient's scaling."""
    vocabulary = shape.model.vocab
    rows = loss.chunk_rows(shape.tokens, vocabulary, torch.bfloat16.itemsize)
    logits = _normal(device, rows, vocabulary)
    labels = torch.randint(vocabulary, (rows,), device=device)
    yield KernelCase("cross_entropy_", loss.cross_entropy_, (logits, labels, -100, 0.0, True))
    yield KernelCase("scale_", loss.scale_, (_normal(device, rows, vocabulary), torch.tensor(-1.0, device=device)))


def optimizer_cases(shape: BlockShape, device: str) -> Iterator[KernelCase]:
    """AdamW's step of one block's weights, and the sum of its gradients' squares."""
    hidden, width = shape.model.hidden, shape.model.intermediate
    sizes = [(rows, hidden) for rows in (*_widths(shape), width, width)] + [(hidden, hidden), (hidden, width)]
    params, grads = ([_normal(device, *size) for size in sizes] for _ in range(2))
    moments, master = ("sqrt8", "log8"), "bf16+8"
    group = {"moments": moments, "group_size": G, "master": master}
    states = [init_state(param, group) for param in params]
    lists = [[state[key] for state in states if key in state] for key in STATE_LISTS.values()]
    rate, one, no = (torch.tensor(value, device=device) for value in (1e-4, 1.0, False))
    options = (0.9, 0.95, 1e-8, 0.1, *moments, master, G)
    numbers = list(range(len(params)))
    step = (params, grads, *lists, rate, one, no, *options, numbers, [0] * len(params))
    yield KernelCase("adamw_step_", adamw.adamw_step_, step)
    yield KernelCase("gradients_sum_squares", adamw.gradients_sum_squares, (grads,))


FAMILIES: dict[str, Callable[[BlockShape, str], Iterator[KernelCase]]] = {
    "quantize": quantize_cases,
    "norm": norm_cases,
    "rope": rope_cases,
    "activation": activation_cases,
    "blockwise": blockwise_cases,
    "loss": loss_cases,
    "optimizer": optimizer_cases,
}
