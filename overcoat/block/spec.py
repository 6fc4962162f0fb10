"""A block as data: branches of (norm, stacked linear layers, mixer, output layer, norm), in a row or side by side.

    pre-norm (Llama)        x = x + out_proj(mixer(in_proj(norm(x))))
    post-norm (OLMo 2)      x = x + norm(out_proj(mixer(in_proj(x))))
    sandwich (Gemma 2)      both norms
    norm of the sum (BERT)  x = norm(x + out_proj(mixer(in_proj(x))))
    parallel (GPT-NeoX)     x = x + sum of all branches of the same x

`Block` holds the parameters themselves. An `autograd.Function` sees only tensors among its own arguments, so the
parameters are passed as one flat list (`tensors_of`) next to the block without them (`without_tensors`), and are
put together again inside (`with_tensors`). Gradients return the same way: as a `Branch` with the same fields.

`RowPermutation` reorders the rows of a weight. Kernels have one layout: (q heads | k heads | v heads), after the gates
if attention's output has them, and columns i and i + D / 2 of a head rotating together. If a model rotates adjacent
columns (GLM, Cohere), or only the first R columns of a head (Phi, GPT-NeoX), the rows of q's and k's weights are
permuted to the kernels' order: scores are sums over the columns of a head, so they are the same in any order. The
parameter does not change: its rows are gathered when it is quantized, and its gradient's rows are put back. Columns
that do not rotate get cos 1 and sin 0 (`padded`).

Legend: D head width, R rotated columns of a head, K the layer's input width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor


class RowPermutation(NamedTuple):
    """How the rows of a weight (or bias) become the rows of the kernels' operand.

    width: D; 0: rows keep their order. rotated: R. heads: how many heads rotate, counted from the first of q.
    rope_interleaved: columns 2 i and 2 i + 1 rotate together; False: columns i and i + R / 2.
    qkv_interleaved: rows repeat this many heads of q, one of k, one of v (GPT-NeoX: 1); 0: all of q, then k, then v.
    gate_interleaved: rows repeat a head of q and its gate (Qwen3.5); all gates come first in the operand.
    transposed: the weight is (K, N) (GPT-2).
    """

    width: int = 0
    rotated: int = 0
    heads: int = 0
    rope_interleaved: bool = False
    qkv_interleaved: int = 0
    transposed: bool = False
    gate_interleaved: bool = False

    def take(self, x: Tensor) -> Tensor:
        """Return a weight or bias in the operand's order."""
        if self.transposed and x.dim() == 2:
            x = x.t().contiguous()
        return x.index_select(0, self._rows(x.shape[0], x.device)) if self.width else x

    def put_back(self, gradient: Tensor) -> Tensor:
        """Return the parameter's gradient from the operand's: undo `take`."""
        if self.width:
            rows = self._rows(gradient.shape[0], gradient.device)
            gradient = torch.empty_like(gradient).index_copy_(0, rows, gradient)
        return gradient.t().contiguous() if self.transposed and gradient.dim() == 2 else gradient

    def count(self, weight: Tensor) -> int:
        """Return how many rows the operand has."""
        return weight.shape[1 if self.transposed else 0]

    def _rows(self, count: int, device: torch.device) -> Tensor:
        """Return int64 (N,): for each row of the operand, the parameter's row."""
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
        if self.gate_interleaved:
            rows = rows.view(-1, 2, self.width).transpose(0, 1).flatten()  # heads of q, then their gates
        moving, rest = rows.split((self.heads * self.width, count - self.heads * self.width))
        rotated, fixed = moving.view(-1, self.width).split((self.rotated, self.width - self.rotated), 1)
        pairs = rotated.unflatten(1, (-1, 2) if self.rope_interleaved else (2, -1))
        first, second = pairs.unbind(2 if self.rope_interleaved else 1)
        halves = fixed.chunk(2, 1) if fixed.shape[1] else (fixed, fixed)
        ordered = torch.cat((first, halves[0], second, halves[1]), 1).flatten()
        return torch.cat((rest, ordered) if self.gate_interleaved else (ordered, rest))


_made_rows: dict[tuple[RowPermutation, int, torch.device], Tensor] = {}


def padded(angles: Tensor, width: int, fill: float) -> Tensor:
    """Return cos or sin (P, R / 2), one column per rotating pair, as (P, D); other columns are `fill`."""
    fixed = angles.new_full((angles.shape[0], width // 2 - angles.shape[1]), fill)
    return torch.cat((angles, fixed, angles, fixed), 1)


class Norm(NamedTuple):
    """A norm's parameters. weight, bias: (H,) or None; centered: LayerNorm instead of RMSNorm."""

    weight: Optional[Tensor]
    bias: Optional[Tensor]
    eps: float
    centered: bool = False


class Adapter(NamedTuple):
    """A low-rank addition (LoRA) to one of the stacked layers: a (r, K), b (N_i, r); layer: its index, from 0.

    dropout: the share of its input's elements that are zero, others times 1 / (1 - dropout); seed: says which
    (`dropped` in linear.py).
    factor: DoRA's magnitudes by norms (N_i,), FP32, which multiply the layer's result without its bias; or None.
    """

    a: Any
    b: Any
    scaling: float
    layer: int = 0
    dropout: float = 0.0
    seed: int = 0
    factor: Any = None


class Linear(NamedTuple):
    """Linear layers that read one input, stacked into one GEMM: weights (N_i, K), biases (N_i,) or None.

    orders: for each layer its row permutation, or None if its rows keep their order; () if all do.
    scale: factor of the result, adapters included.
    operand: in a small block, the weights as FP8 operand, their scale and maximum (`with_operands` in linear.py).
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

    mixer: what is between the two linear layers: `Attention` (attention.py) or `Mlp` (mlp.py); holds constants only.
    qk_norm: the mixer's own parameters: q/k norm weights, and attention's other per-layer tensors.
    pre, post: the norms before and after, or None. norm_after_residual: `post` norms the sum x + y, not y.
    """

    mixer: Any
    in_proj: Linear
    out_proj: Linear
    qk_norm: tuple[Any, ...] = ()
    pre: Optional[Norm] = None
    post: Optional[Norm] = None
    norm_after_residual: bool = False


class Block(NamedTuple):
    """Branches, one after the other, or if `parallel` each on the block's input."""

    branches: tuple[Branch, ...]
    parallel: bool = False


class Tables(NamedTuple):
    """Tensors that all layers share: cos and sin (P, D); the mask, or None (kernels/attention.py)."""

    cos: Tensor
    sin: Tensor
    mask: Optional[Tensor] = None


class ForwardScales(NamedTuple):
    """Numbers that a branch's forward finds and a recomputation reuses, each 0-d or None.

    in_proj, out_proj: max |weight|. activation: the scale of the MLP's activation.
    """

    in_proj: Optional[Tensor] = None
    activation: Optional[Tensor] = None
    out_proj: Optional[Tensor] = None


def tensors_of(branches: Sequence[Branch]) -> list[Any]:
    """Return all parameters (or gradients, ...) as one flat list."""
    flat: list[Any] = []
    for _, in_proj, out_proj, qk_norm, pre, post, _ in branches:
        if pre is not None:
            flat += pre[:2]
        flat += (*_tensors(in_proj), *qk_norm, *_tensors(out_proj))
        if post is not None:
            flat += post[:2]
    return flat


def with_tensors(block: Block, flat: tuple[Any, ...]) -> Block:
    """Return the block with other tensors, in the order of `tensors_of`."""
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
    parts = [part for each in linear.adapters for part in (each.a, each.b, each.factor)] if linear.adapters else ()
    return (*linear.weights, *linear.biases, *parts)


def _linear_at(flat: tuple[Any, ...], start: int, linear: Linear) -> tuple[Linear, int]:
    middle, end = start + len(linear.weights), start + 2 * len(linear.weights)
    adapters, last = linear.adapters, end + 3 * len(linear.adapters)
    if adapters:
        parts = zip(adapters, flat[end:last:3], flat[end + 1 : last : 3], flat[end + 2 : last : 3], strict=True)
        adapters = tuple([each._replace(a=a, b=b, factor=factor) for each, a, b, factor in parts])
    return Linear(flat[start:middle], flat[middle:end], linear.orders, linear.scale, adapters), last


def without_tensors(block: Block) -> Block:
    """Return the block with None for every parameter."""
    return with_tensors(block, (None,) * len(tensors_of(block.branches)))
