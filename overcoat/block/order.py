"""Rows of a parameter in another order than the block's: (q heads | k heads | v heads), pairs that rotate D / 2 apart.

Kernels know one layout of a head: columns i and i + D / 2 rotate together. Where a model rotates neighbours (GLM,
Cohere), or the first R columns of a head alone (Phi, GPT-NeoX), the rows of q's and k's weights are taken in the order
that makes it so: scores are sums over the columns of a head, so they are the same in any order. The parameter stays as
it is; its rows are gathered as it is quantized, and its gradient's rows put back. Columns that do not rotate get cos 1
and sin 0 (`tables`).

Legend: D head width, R how many of a head's columns rotate, K the layer's input width.
"""

from __future__ import annotations

from typing import NamedTuple

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
