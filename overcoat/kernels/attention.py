"""Softmax attention on the fused q/k/v buffer, forward and backward from (q, k, v, o, log-sum-exp).

    S = scale * q k^T + mask,  P = softmax(S),  o = P v,  lse = log sum exp S

The backward needs neither S nor P: with D = sum_d(do * o) per query,

    P = exp(S - lse),  dv = P^T do,  dS = P * (do v^T - D),  dq = scale * dS k,  dk = scale * dS^T q

so what attention keeps is q, k, v, o and lse, and the caller may hand them back decoded from 8 bits. Grouped-query
heads: query head i reads key/value head i // (num_q / num_kv).

The reference forms S in FP32. On CUDA the library's fused kernels run (attention_fused.py); but none of them has a cap
with a backward, so capped scores are the reference's everywhere, one row of the batch at a time:

    S = cap * tanh(scale * q k^T / cap) + mask,  dS is times (1 - tanh^2)

Legend: B batch, S sequence length, D head width, T = B * S. Column layout of a fused buffer: [q heads | k | v].
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from overcoat.kernels.attention_fused import Kernel, chosen
from overcoat.kernels.op import op
from overcoat.kernels.packed import Three, causal_pairs, dense_mask, is_starts


def heads_of(qkv: Tensor, batch: int, num_q: int, num_kv: int) -> Three:
    """(T, (num_q + 2 num_kv) * D) -> views q (B, num_q, S, D), k and v (B, num_kv, S, D)."""
    heads = qkv.reshape(batch, qkv.shape[0] // batch, num_q + 2 * num_kv, -1).transpose(1, 2)
    q, k, v = heads.split_with_sizes((num_q, num_kv, num_kv), dim=1)
    return q, k, v


def _tokens_first(x: Tensor) -> Tensor:
    """(B, heads, S, D) -> (T, heads * D)."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1)


def token_rows(dtype: torch.dtype, *parts: Tensor) -> Three:
    """Parts (B, heads, S, D), each as (T, heads * D) contiguous; a view where the kernel wrote tokens first."""
    dq, dk, dv = (_tokens_first(part).to(dtype) for part in parts)
    return dq, dk, dv


def _scores(
    q: Tensor, k: Tensor, mask: Optional[Tensor], scale: float, causal: bool, cap: float, window: int
) -> Tuple[Tensor, Optional[Tensor]]:
    """FP32 scores (B, num_kv, R, S, S), R = num_q / num_kv; without a mask causal, or of all pairs. With a cap also the
    tanh inside."""
    if mask is not None and is_starts(mask):
        mask = dense_mask(mask, q.shape[0], q.shape[2], causal, window)
    scores = q.float().unflatten(1, (k.shape[1], -1)) @ k.float().unsqueeze(2).transpose(-1, -2)
    inside = torch.tanh(scores * (scale / cap)) if cap else None
    scores = scale * scores if inside is None else cap * inside
    if mask is None and not causal:
        return scores, inside
    if mask is None:
        mask = causal_pairs(scores.shape[-1], window, q.device)
    else:
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, scores.shape[1:3])
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float(), inside


# A query whose log-sum-exp lies below this sees no key: its mask is -inf, or the most negative BF16 or FP32 number.
NOTHING_VISIBLE = -1e30


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(S - lse); a query that may see no key (all padding) gets zeros."""
    return torch.exp(scores - lse.masked_fill(lse < NOTHING_VISIBLE, 0.0))


def _plain(
    qkv: Three, mask: Optional[Tensor], scale: float, causal: bool, cap: float = 0.0, window: int = 0
) -> Tuple[Tensor, Tensor]:
    """`Kernel.forward` in plain PyTorch: the reference."""
    q, k, v = qkv
    scores, _ = _scores(q, k, mask, scale, causal, cap, window)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    o = _probabilities(scores, lse) @ v.float().unsqueeze(2)
    return o.flatten(1, 2).to(q.dtype), lse.squeeze(-1).flatten(1, 2)


def _plain_backward(
    do: Tensor, qkv: Three, o: Tensor, lse: Tensor, mask: Optional[Tensor], scale: float, causal: bool,
    cap: float = 0.0, window: int = 0,
) -> Three:  # fmt: skip
    """`Kernel.backward` likewise; gradients in FP32."""
    q, k, v = qkv
    groups = (k.shape[1], -1)
    do_, o_ = do.float().unflatten(1, groups), o.float().unflatten(1, groups)
    scores, inside = _scores(q, k, mask, scale, causal, cap, window)
    p = _probabilities(scores, lse.unflatten(1, groups).unsqueeze(-1))
    ds = p * (do_ @ v.float().unsqueeze(2).transpose(-1, -2) - (do_ * o_).sum(-1, keepdim=True))
    ds = (ds if inside is None else ds * (1 - inside.square())) * scale
    dq = (ds @ k.float().unsqueeze(2)).flatten(1, 2)
    dk = (ds.transpose(-1, -2) @ q.float().unflatten(1, groups)).sum(2)
    return dq, dk, (p.transpose(-1, -2) @ do_).sum(2)


PLAIN = Kernel(_plain, _plain_backward)


def _by_row(mask: Optional[Tensor], batch: int, sequence: int, causal: bool, window: int) -> Sequence[Optional[Tensor]]:
    """The mask of each row of the batch."""
    if mask is None:
        return [None] * batch
    if is_starts(mask):
        mask = dense_mask(mask, batch, sequence, causal, window)
    return mask.expand(batch, *mask.shape[1:]).split(1)


@op
def attention(
    qkv: Tensor, mask: Optional[Tensor], batch: int, num_q: int, num_kv: int, scale: float, causal: bool = True,
    cap: float = 0.0, window: int = 0,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over rotated q, k, v.

    Args:
        qkv: (T, (num_q + 2 num_kv) * D).
        mask: None; or (B or 1, 1 or num_q, S, S), bool (True = visible) or additive; or where documents begin, int32
            (N + 1,) (packed.py).
        causal: whether a token sees only those before it, where the mask is not of all pairs.
        cap: scores are cap * tanh(score / cap) (Gemma 2); 0: as they are.
        window: causal attention among the last `window` tokens up to a query's own; 0: all. A mask of all pairs holds
            it already, and then it changes nothing.

    Returns:
        o (T, num_q * D) of qkv's dtype; lse FP32 (B, num_q, S).
    """
    if cap and batch > 1:
        sequence, last = qkv.shape[0] // batch, (1, num_q, num_kv, scale, causal, cap, window)
        rows = zip(qkv.contiguous().split(sequence), _by_row(mask, batch, sequence, causal, window), strict=True)
        o, lse = (torch.cat(parts) for parts in zip(*[attention.reference(*row, *last) for row in rows], strict=True))
        return o, lse
    o, lse = _plain(heads_of(qkv, batch, num_q, num_kv), mask, scale, causal, cap, window)
    return _tokens_first(o), lse


@attention.fake
def _(qkv, mask, batch, num_q, num_kv, *_):
    width = qkv.shape[1] // (num_q + 2 * num_kv)
    lse = qkv.new_empty(batch, num_q, qkv.shape[0] // batch, dtype=torch.float32)
    return qkv.new_empty(qkv.shape[0], num_q * width), lse


@op
def attention_backward(
    do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, mask: Optional[Tensor], batch: int, num_q: int, num_kv: int,
    scale: float, causal: bool = True, cap: float = 0.0, window: int = 0,
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q (T, num_q * D), k and v (T, num_kv * D) from do (T, num_q * D)."""
    sequence, last = qkv.shape[0] // batch, (num_q, num_kv, scale, causal, cap, window)
    if cap and batch > 1:
        parts = [x.contiguous().split(sequence) for x in (do, qkv, o)]
        masks = _by_row(mask, batch, sequence, causal, window)
        rows = zip(*parts, lse.contiguous().split(1), masks, strict=True)
        gradients = [attention_backward.reference(*row, 1, *last) for row in rows]
        dq, dk, dv = (torch.cat(parts) for parts in zip(*gradients, strict=True))
        return dq, dk, dv
    do, o = (x.reshape(batch, sequence, num_q, -1).transpose(1, 2) for x in (do, o))
    whole = heads_of(qkv, batch, num_q, num_kv)
    return token_rows(qkv.dtype, *_plain_backward(do, whole, o, lse, mask, scale, causal, cap, window))


@attention_backward.fake
def _(do, qkv, o, lse, mask, batch, num_q, num_kv, *_):
    tokens, width = qkv.shape[0], qkv.shape[1] // (num_q + 2 * num_kv)
    return tuple(qkv.new_empty(tokens, heads * width) for heads in (num_q, num_kv, num_kv))


def forward_by(
    kernel: Kernel, qkv: Three, mask: Optional[Tensor], scale: float, causal: bool = True
) -> Tuple[Tensor, Tensor]:
    """`attention` by one of the library's kernels, from `heads_of` a contiguous buffer and a mask that it takes."""
    o, lse = kernel.forward(qkv, mask, scale, causal)
    sequence = qkv[0].shape[2]
    return _tokens_first(o), (lse if lse.shape[2] == sequence else lse[..., :sequence]).contiguous()


def backward_by(
    kernel: Kernel, do: Tensor, qkv: Three, o: Tensor, lse: Tensor, mask: Optional[Tensor], scale: float,
    causal: bool = True,
) -> Three:  # fmt: skip
    """`attention_backward` by one of the library's kernels; do, o and lse contiguous, qkv as in `forward_by`."""
    q = qkv[0]
    do, o = (x.view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2) for x in (do, o))
    return token_rows(q.dtype, *kernel.backward(do, qkv, o, lse, mask, scale, causal))


@attention.cuda
def _(qkv, mask, batch, num_q, num_kv, scale, causal=True, cap=0.0, window=0):
    # cuDNN takes heads that lie apart, but crashes on elements that do.
    parts = heads_of(qkv.contiguous(), batch, num_q, num_kv)
    kernel, taken = _kernel_and_mask(parts[0], mask, causal, cap, window)
    if kernel is None:
        return attention.reference(qkv, mask, batch, num_q, num_kv, scale, causal, cap, window)
    return forward_by(kernel, parts, taken, scale, causal)


@attention_backward.cuda
def _(do, qkv, o, lse, mask, batch, num_q, num_kv, scale, causal=True, cap=0.0, window=0):
    parts = heads_of(qkv.contiguous(), batch, num_q, num_kv)
    kernel, taken = _kernel_and_mask(parts[0], mask, causal, cap, window)
    if kernel is None:
        return attention_backward.reference(do, qkv, o, lse, mask, batch, num_q, num_kv, scale, causal, cap, window)
    return backward_by(kernel, do.contiguous(), parts, o.contiguous(), lse.contiguous(), taken, scale, causal)


def _kernel_and_mask(
    q: Tensor, mask: Optional[Tensor], causal: bool, cap: float, window: int
) -> Tuple[Optional[Kernel], Optional[Tensor]]:
    """The kernel, None for the reference, and the mask that it gets: one of all pairs where it knows neither window nor
    `starts`."""
    batch, _, sequence, _ = q.shape
    if not causal or window >= sequence or not (mask is None or is_starts(mask)):
        window = 0
    kernel = None if cap else chosen(q, mask, window)
    if kernel is None or kernel.packed or (mask is None and not window):
        return kernel, mask
    if mask is None:
        return kernel, causal_pairs(sequence, window, q.device)[None, None]
    return kernel, dense_mask(mask, batch, sequence, causal, window) if is_starts(mask) else mask
