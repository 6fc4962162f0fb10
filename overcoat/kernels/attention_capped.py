"""Softmax attention whose scores pass a soft cap (Gemma 2), forward and backward, one row of the batch at a time.

    S = cap * tanh(scale * q k^T / cap) + mask,   dZ = dS * (1 - tanh^2)

No kernel of the library has the cap with a backward: on every device this is plain PyTorch in FP32, exact and slow. It
holds num_q * S * S scores of one row of the batch.

Legend: B batch, S sequence length, D head width, T = B * S, R = num_q / num_kv.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.kernels.attention import _group_mask, _heads, _probabilities
from overcoat.kernels.op import op
from overcoat.kernels.packed import dense_mask, is_starts


def _visible(mask: Optional[Tensor], row: int, batch: int, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """The mask of one row of the batch, (num_kv or 1, R or 1, S, S), bool or additive."""
    sequence = q.shape[2]
    if mask is None:
        visible = torch.ones((1, 1, sequence, sequence), dtype=torch.bool, device=q.device)
        return visible.tril() if causal else visible
    if is_starts(mask):
        mask = dense_mask(mask, batch, sequence, causal)
    mask = mask[row % mask.shape[0]].unsqueeze(0)
    return _group_mask(mask, k.shape[1], q.shape[1] // k.shape[1])[0]


def _row_scores(q: Tensor, k: Tensor, visible: Tensor, scale: float, cap: float) -> Tuple[Tensor, Tensor]:
    """Masked scores (num_kv, R, S, S) of q (num_q, S, D) and k (num_kv, S, D), and the tanh inside."""
    inside = torch.tanh(q.float().unflatten(0, (k.shape[0], -1)) @ k.float().unsqueeze(1).mT * (scale / cap))
    scores = cap * inside
    scores = scores.masked_fill(~visible, -torch.inf) if visible.dtype == torch.bool else scores + visible.float()
    return scores, inside


@op
def attention_capped(
    qkv: Tensor,
    mask: Optional[Tensor],
    batch: int,
    num_q: int,
    num_kv: int,
    scale: float,
    cap: float,
    causal: bool = True,
) -> Tuple[Tensor, Tensor]:
    """`attention` with capped scores: o (T, num_q * D) of qkv's dtype, lse FP32 (B, num_q, S)."""
    q, k, v = _heads(qkv.contiguous(), batch, num_q, num_kv)
    o, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)
    for row in range(batch):
        scores, _ = _row_scores(q[row], k[row], _visible(mask, row, batch, q, k, causal), scale, cap)
        found = torch.logsumexp(scores, -1, keepdim=True)
        o[row] = (_probabilities(scores, found) @ v[row].float().unsqueeze(1)).flatten(0, 1)
        lse[row] = found.squeeze(-1).flatten(0, 1)
    return o.transpose(1, 2).reshape(qkv.shape[0], -1), lse


@attention_capped.fake
def _(qkv, mask, batch, num_q, num_kv, scale, cap, causal=True):
    width = qkv.shape[1] // (num_q + 2 * num_kv)
    lse = qkv.new_empty((batch, num_q, qkv.shape[0] // batch), dtype=torch.float32)
    return qkv.new_empty((qkv.shape[0], num_q * width)), lse


@op
def attention_capped_backward(
    do: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: Optional[Tensor],
    batch: int,
    num_q: int,
    num_kv: int,
    scale: float,
    cap: float,
    causal: bool = True,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (T, num_q * D), k and v (T, num_kv * D) from do (T, num_q * D)."""
    q, k, v = _heads(qkv.contiguous(), batch, num_q, num_kv)
    do_, o_ = (x.contiguous().view(batch, -1, num_q, q.shape[3]).transpose(1, 2) for x in (do, o))
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    for row in range(batch):
        scores, inside = _row_scores(q[row], k[row], _visible(mask, row, batch, q, k, causal), scale, cap)
        p = _probabilities(scores, lse[row].unflatten(0, (num_kv, -1)).unsqueeze(-1))
        dy, y = (x[row].float().unflatten(0, (num_kv, -1)) for x in (do_, o_))
        ds = p * (dy @ v[row].float().unsqueeze(1).mT - (dy * y).sum(-1, keepdim=True)) * (1 - inside.square()) * scale
        parts[0][row] = (ds @ k[row].float().unsqueeze(1)).flatten(0, 1)
        parts[1][row] = (ds.mT @ q[row].float().unflatten(0, (num_kv, -1))).sum(1)
        parts[2][row] = (p.mT @ dy).sum(1)
    dq, dk, dv = (x.transpose(1, 2).reshape(qkv.shape[0], -1) for x in parts)
    return dq, dk, dv


@attention_capped_backward.fake
def _(do, qkv, o, lse, mask, batch, num_q, num_kv, scale, cap, causal=True):
    tokens, width = qkv.shape[0], qkv.shape[1] // (num_q + 2 * num_kv)
    return tuple(qkv.new_empty((tokens, heads * width)) for heads in (num_q, num_kv, num_kv))
