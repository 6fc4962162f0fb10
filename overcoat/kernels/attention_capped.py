"""Softmax attention whose scores pass a soft cap (Gemma 2), forward and backward, one row of the batch at a time.

    S = cap * tanh(scale * q k^T / cap) + mask,   dZ = dS * (1 - tanh^2)

No kernel of the library has the cap with a backward: on every device this is plain PyTorch in FP32, exact and slow. It
holds num_q * S * S scores of one row of the batch.

Legend: B batch, S sequence length, D head width, T = B * S.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from overcoat.kernels.attention import attend, attend_backward, attention, attention_backward
from overcoat.kernels.op import op
from overcoat.kernels.packed import dense_mask, is_starts


def _by_row(mask: Optional[Tensor], batch: int, sequence: int, causal: bool) -> Sequence[Optional[Tensor]]:
    """The mask of each row of the batch."""
    if mask is None:
        return [None] * batch
    if is_starts(mask):
        mask = dense_mask(mask, batch, sequence, causal)
    return mask.expand(batch, *mask.shape[1:]).split(1)


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
    sequence = qkv.shape[0] // batch
    rows = zip(qkv.contiguous().split(sequence), _by_row(mask, batch, sequence, causal), strict=True)
    o, lse = zip(*[attend(x, own, (1, num_q, num_kv), scale, causal, cap) for x, own in rows], strict=True)
    return torch.cat(o), torch.cat(lse)


attention_capped.fake(attention.shapes)


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
    sequence = qkv.shape[0] // batch
    masks, sizes = _by_row(mask, batch, sequence, causal), (1, num_q, num_kv)
    parts = [x.contiguous().split(sequence) for x in (do, qkv, o)]
    rows = zip(*parts, lse.contiguous().split(1), masks, strict=True)
    gradients = [attend_backward(dy, x, y, own_lse, own, sizes, scale, causal, cap) for dy, x, y, own_lse, own in rows]
    dq, dk, dv = (torch.cat(parts) for parts in zip(*gradients, strict=True))
    return dq, dk, dv


attention_capped_backward.fake(attention_backward.shapes)
