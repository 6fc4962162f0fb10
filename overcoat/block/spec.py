"""A block as data: branches of (norm, stacked linear layers, core, output layer, norm), in a row or side by side.

    pre-norm (Llama)        x = x + out(core(into(norm(x))))
    post-norm (OLMo 2)      x = x + norm(out(core(into(x))))
    sandwich (Gemma 2)      both norms
    norm of the sum (BERT)  x = norm(x + out(core(into(x))))
    parallel (GPT-NeoX)     x = x + sum of all branches of the same x

`Block` holds the parameters themselves. An `autograd.Function` knows tensors among its own arguments alone, so the
parameters go in as one flat list (`tensors_of`) beside the same block without them (`without_tensors`), and are put
together again inside (`with_tensors`). Gradients go the same way back: a `Branch` of gradients, by the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from torch import Tensor

from overcoat.block.order import RowPermutation


class Norm(NamedTuple):
    """A norm's parameters. weight, bias: (H,) or None; centered: LayerNorm instead of RMSNorm."""

    weight: Optional[Tensor]
    bias: Optional[Tensor]
    eps: float
    centered: bool = False


class Adapter(NamedTuple):
    """A low-rank addition to one of stacked layers (adapters.py): a (r, K), b (N_i, r); layer: which, from 0."""

    a: Any
    b: Any
    scaling: float
    layer: int = 0


class Linear(NamedTuple):
    """Linear layers that read one input, one GEMM: weights (N_i, K), biases (N_i,) or None.

    orders: for each layer how its rows become those of the operand (order.py), or None as they are; () for all.
    scale: what the result is multiplied by, that of adapters too.
    operand: inside a small block, the weights as FP8 operand, their scale and maximum (operands.py).
    """

    weights: tuple[Any, ...]
    biases: tuple[Any, ...]
    orders: tuple[Optional[RowPermutation], ...] = ()
    scale: float = 1.0
    adapters: tuple[Adapter, ...] = ()
    operand: Optional[Sequence[Any]] = None

    @property
    def has_bias(self) -> bool:
        """Whether any of the layers has one."""
        return any(bias is not None for bias in self.biases)


class Branch(NamedTuple):
    """One residual branch.

    core: what is between the two linear layers: `Attention` (attention.py) or `Mlp` (mlp.py), constants alone.
    inner: the core's own parameters: q/k norm weights.
    pre, post: the norms before and after, or None; outer: `post` is of the sum.
    """

    mixer: Any
    in_proj: Linear
    out_proj: Linear
    qk_norm: tuple[Any, ...] = ()
    pre: Optional[Norm] = None
    post: Optional[Norm] = None
    norm_after_residual: bool = False


class Block(NamedTuple):
    """Branches in a row, or all of the block's input if `parallel`."""

    branches: tuple[Branch, ...]
    parallel: bool = False


class Tables(NamedTuple):
    """What all layers share: cos and sin (P, D); the mask, or None (kernels/attention.py, kernels/packed.py)."""

    cos: Tensor
    sin: Tensor
    mask: Optional[Tensor] = None


class ForwardScales(NamedTuple):
    """What a branch's forward has found and its recomputation need not find again, None where unknown: maxima of the
    weights, and the scale of what the MLP's output layer reads, each 0-d."""

    in_proj: Optional[Tensor] = None
    activation: Optional[Tensor] = None
    out_proj: Optional[Tensor] = None


def tensors_of(branches: Sequence[Branch]) -> list[Any]:
    """All parameters (or gradients, ...) as one flat list."""
    flat: list[Any] = []
    for _, in_proj, out_proj, qk_norm, pre, post, _ in branches:
        if pre is not None:
            flat += pre[:2]
        flat += (*_tensors(in_proj), *qk_norm, *_tensors(out_proj))
        if post is not None:
            flat += post[:2]
    return flat


def with_tensors(block: Block, flat: tuple[Any, ...]) -> Block:
    """The block with other tensors, in the order of `tensors_of`."""
    branches, i = [], 0
    for mixer, in_proj, out_proj, qk_norm, pre, post, norm_after_residual in block.branches:
        if pre is not None:
            pre = Norm(flat[i], flat[i + 1], pre.eps, pre.centered)
            i += 2
        in_proj, i = _linear_at(flat, i, in_proj)
        qk_norm, i = flat[i : i + len(qk_norm)], i + len(qk_norm)
        out_proj, i = _linear_at(flat, i, out_proj)
        if post is not None:
            post = Norm(flat[i], flat[i + 1], post.eps, post.centered)
            i += 2
        branches.append(Branch(mixer, in_proj, out_proj, qk_norm, pre, post, norm_after_residual))
    return Block(tuple(branches), block.parallel)


def _tensors(linear: Linear) -> tuple[Any, ...]:
    parts = [part for adapter in linear.adapters for part in adapter[:2]] if linear.adapters else ()
    return (*linear.weights, *linear.biases, *parts)


def _linear_at(flat: tuple[Any, ...], start: int, linear: Linear) -> tuple[Linear, int]:
    middle, end = start + len(linear.weights), start + 2 * len(linear.weights)
    adapters = linear.adapters and tuple(
        [each._replace(a=flat[end + 2 * i], b=flat[end + 2 * i + 1]) for i, each in enumerate(linear.adapters)]
    )
    made = Linear(flat[start:middle], flat[middle:end], linear.orders, linear.scale, adapters)
    return made, end + 2 * len(adapters)


def without_tensors(block: Block) -> Block:
    """The block's constants: None for every parameter."""
    return with_tensors(block, (None,) * len(tensors_of(block.branches)))
