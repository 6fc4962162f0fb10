"""A block as data: branches of (norm, stacked linear layers, mixer, output layer, norm), in a row or side by side.

    pre-norm (Llama)        x = x + out_proj(mixer(in_proj(norm(x))))
    post-norm (OLMo 2)      x = x + norm(out_proj(mixer(in_proj(x))))
    sandwich (Gemma 2)      both norms
    norm of the sum (BERT)  x = norm(x + out_proj(mixer(in_proj(x))))
    parallel (GPT-NeoX)     x = x + sum of all branches of the same x

`Block` holds the parameters themselves. An `autograd.Function` sees only tensors among its own arguments, so the
parameters are passed as one flat list (`tensors_of`) beside the same block without them (`without_tensors`), and are
put together again inside (`with_tensors`). Gradients return the same way: a `Branch` of gradients, by the same names.

`RowPermutation` reorders the rows of a weight. Kernels have one layout: (q heads | k heads | v heads), columns i and i
+ D / 2 of a head rotating together. Where a model rotates pairs of neighbouring columns (GLM, Cohere), or only the
first R columns of a head (Phi, GPT-NeoX), the rows of q's and k's weights are taken in the kernels' order: scores are
sums over the columns of a head, so they are the same in any order. The parameter stays as it is: its rows are gathered
as it is quantized, and the rows of its gradient put back. Columns that do not rotate get cos 1 and sin 0 (`tables`).

Legend: D head width, R rotated columns of a head, K the layer's input width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor


class RowPermutation(NamedTuple):
    """How the rows of a weight are taken.

    width: D. rotated: R. heads: how many heads are rotated, the first ones of q, k, v.
    rope_interleaved: columns 2 i and 2 i + 1 rotate together instead of i and i + R / 2.
    qkv_interleaved: rows are this many heads of q, one of k, one of v, and so on (GPT-NeoX: 1); 0: all of q first.
    transposed: the weight is (K, N) (GPT-2).
    """

    width: int = 0
    rotated: int = 0
    heads: int = 0
    rope_interleaved: bool = False
    qkv_interleaved: int = 0
    transposed: bool = False

    def take(self, x: Tensor) -> Tensor:
        """A weight or bias in the operand's order."""
        if self.transposed and x.dim() == 2:
            x = x.t().contiguous()
        return x.index_select(0, self._rows(x.shape[0], x.device)) if self.width else x

    def put_back(self, gradient: Tensor) -> Tensor:
        """A gradient of what `take` returns as the parameter's."""
        if self.width:
            rows = self._rows(gradient.shape[0], gradient.device)
            gradient = torch.empty_like(gradient).index_copy_(0, rows, gradient)
        return gradient.t().contiguous() if self.transposed and gradient.dim() == 2 else gradient

    def count(self, weight: Tensor) -> int:
        """How many rows the operand has."""
        return weight.shape[1 if self.transposed else 0]

    def _rows(self, count: int, device: torch.device) -> Tensor:
        """(N,) int64: the parameter's row for each of the operand's."""
        if torch.compiler.is_compiling():
            return self._made(count, device)
        key = (self, count, device)
        if key not in _made_rows:
            _made_rows[key] = self._made(count, device)
        return _made_rows[key]

    def _made(self, count: int, device: torch.device) -> Tensor:
        rows = torch.arange(count, device=device)
        if self.qkv_interleaved:
            heads = rows.view(-1, self.qkv_interleaved + 2, self.width)
            rows = torch.cat([part.flatten() for part in heads.split((self.qkv_interleaved, 1, 1), 1)])
        moving, rest = rows.split((self.heads * self.width, count - self.heads * self.width))
        turned, still = moving.view(-1, self.width).split((self.rotated, self.width - self.rotated), 1)
        pairs = turned.unflatten(1, (-1, 2) if self.rope_interleaved else (2, -1))
        first, second = pairs.unbind(2 if self.rope_interleaved else 1)
        kept = still.chunk(2, 1) if still.shape[1] else (still, still)
        return torch.cat((torch.cat((first, kept[0], second, kept[1]), 1).flatten(), rest))


_made_rows: dict[tuple[RowPermutation, int, torch.device], Tensor] = {}


def padded(angles: Tensor, width: int, fill: float) -> Tensor:
    """cos or sin (P, R / 2), one column for each pair that rotates, as (P, D) for the kernels."""
    still = angles.new_full((angles.shape[0], width // 2 - angles.shape[1]), fill)
    return torch.cat((angles, still, angles, still), 1)


class Norm(NamedTuple):
    """A norm's parameters. weight, bias: (H,) or None; centered: LayerNorm instead of RMSNorm."""

    weight: Optional[Tensor]
    bias: Optional[Tensor]
    eps: float
    centered: bool = False


class Adapter(NamedTuple):
    """A low-rank addition to one of stacked layers (linear.py): a (r, K), b (N_i, r); layer: which, from 0."""

    a: Any
    b: Any
    scaling: float
    layer: int = 0


class Linear(NamedTuple):
    """Linear layers that read one input, one GEMM: weights (N_i, K), biases (N_i,) or None.

    orders: for each layer how its rows become those of the operand, or None as they are; () for all.
    scale: factor of the result, adapters included.
    operand: inside a small block, the weights as FP8 operand, their scale and maximum (linear.py).
    """

    weights: tuple[Any, ...]
    biases: tuple[Any, ...]
    orders: tuple[Optional[RowPermutation], ...] = ()
    scale: float = 1.0
    adapters: tuple[Adapter, ...] = ()
    operand: Optional[Sequence[Any]] = None

    @property
    def has_bias(self) -> bool:
        """True if any of the layers has a bias."""
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
    """Tensors that all layers share: cos and sin (P, D); the mask, or None (kernels/attention.py)."""

    cos: Tensor
    sin: Tensor
    mask: Optional[Tensor] = None


class ForwardScales(NamedTuple):
    """Scales that a branch's forward found and its recomputation reuses, each 0-d, None where unknown: maxima of the
    weights, and the scale of the MLP's activation."""

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
