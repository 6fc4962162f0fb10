"""Softmax attention on the fused q/k/v buffer, forward and backward from (q, k, v, o, log-sum-exp).

    S = scale * q k^T + mask,  P = softmax(S),  o = P v,  lse = log sum exp S

The backward needs neither S nor P: with D = sum_d(do * o) per query,

    P = exp(S - lse),  dv = P^T do,  dS = P * (do v^T - D),  dq = scale * dS k,  dk = scale * dS^T q

so what attention keeps is q, k, v, o and lse, and the caller may hand them back decoded from 8 bits. Grouped-query
heads: query head i reads key/value head i // (num_q / num_kv).

The reference forms S in FP32. On CUDA the library's fused kernels run, chosen by rule: with a mask the memory-efficient
one; causal, cuDNN's on Hopper and newer where it takes the shape (1.7 times as fast as FlashAttention there: B4 S2048
32 x 128 heads, forward 0.30 ms against 0.49, backward 0.88 against 1.56), FlashAttention otherwise, and whenever
`torch.use_deterministic_algorithms` asks for one result each time (cuDNN adds up dq in any order).

Legend: B batch, S sequence length, D head width, T = B * S. Column layout of a fused buffer: [q heads | k | v].
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.catalogue import op


def _heads(qkv: Tensor, batch: int, num_q: int, num_kv: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(T, (num_q + 2 num_kv) * D) -> views q (B, num_q, S, D), k and v (B, num_kv, S, D)."""
    heads = qkv.view(batch, qkv.shape[0] // batch, num_q + 2 * num_kv, -1).transpose(1, 2)
    q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
    return q, k, v


def _tokens_first(x: Tensor) -> Tensor:
    """(B, heads, S, D) -> (T, heads * D)."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1)


def _token_rows(dtype: torch.dtype, *parts: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Parts (B, heads, S, D), each as (T, heads * D) contiguous; a view where the kernel wrote tokens first."""
    dq, dk, dv = (_tokens_first(part).to(dtype) for part in parts)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, mask: Optional[Tensor], scale: float) -> Tensor:
    """FP32 scores (B, num_kv, R, S, S), R = num_q / num_kv; causal without a mask."""
    q = q.float().unflatten(1, (k.shape[1], -1))
    scores = scale * (q @ k.float().unsqueeze(2).transpose(-1, -2))
    if mask is None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(future, -torch.inf)
    mask = _group_mask(mask, k.shape[1], scores.shape[2])
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()


def _group_mask(mask: Tensor, num_kv: int, ratio: int) -> Tensor:
    if mask.shape[1] == 1:
        return mask.unsqueeze(2)
    return mask.unflatten(1, (num_kv, ratio))


# A query whose log-sum-exp lies below this sees no key: its mask is -inf, or the most negative BF16 or FP32 number.
NOTHING_VISIBLE = -1e30


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(S - lse); a query that may see no key (all padding) gets zeros."""
    return torch.exp(scores - lse.masked_fill(lse < NOTHING_VISIBLE, 0.0))


@op
def attention(
    qkv: Tensor, mask: Optional[Tensor], batch: int, num_q: int, num_kv: int, scale: float
) -> Tuple[Tensor, Tensor]:
    """Attention over rotated q, k, v.

    Args:
        qkv: (T, (num_q + 2 num_kv) * D).
        mask: None for causal; else (B or 1, 1 or num_q, S, S), bool (True = visible) or additive.

    Returns:
        o (T, num_q * D) of qkv's dtype; lse FP32 (B, num_q, S).
    """
    q, k, v = _heads(qkv, batch, num_q, num_kv)
    scores = _scores(q, k, mask, scale)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    o = _probabilities(scores, lse) @ v.float().unsqueeze(2)
    return _tokens_first(o.flatten(1, 2)).to(qkv.dtype), lse.squeeze(-1).flatten(1, 2)


@attention.fake
def _(qkv, mask, batch, num_q, num_kv, scale):
    width = qkv.shape[1] // (num_q + 2 * num_kv)
    lse = qkv.new_empty((batch, num_q, qkv.shape[0] // batch), dtype=torch.float32)
    return qkv.new_empty((qkv.shape[0], num_q * width)), lse


@op
def attention_backward(
    do: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: Optional[Tensor],
    batch: int,
    num_q: int,
    num_kv: int,
    scale: float,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (T, num_q * D), k and v (T, num_kv * D) from do (T, num_q * D)."""
    q, k, v = _heads(qkv, batch, num_q, num_kv)
    sequence = qkv.shape[0] // batch

    def grouped(x: Tensor) -> Tensor:
        return x.view(batch, sequence, num_q, -1).transpose(1, 2).float().unflatten(1, (num_kv, -1))

    do_, o_ = grouped(do), grouped(o)
    p = _probabilities(_scores(q, k, mask, scale), lse.unflatten(1, (num_kv, -1)).unsqueeze(-1))
    dp = do_ @ v.float().unsqueeze(2).transpose(-1, -2)
    ds = p * (dp - (do_ * o_).sum(-1, keepdim=True)) * scale
    dq = (ds @ k.float().unsqueeze(2)).flatten(1, 2)
    dk = (ds.transpose(-1, -2) @ q.float().unflatten(1, (num_kv, -1))).sum(2)
    dv = (p.transpose(-1, -2) @ do_).sum(2)
    return _token_rows(qkv.dtype, dq, dk, dv)


@attention_backward.fake
def _(do, qkv, o, lse, mask, batch, num_q, num_kv, scale):
    tokens, width = qkv.shape[0], qkv.shape[1] // (num_q + 2 * num_kv)
    return tuple(qkv.new_empty((tokens, heads * width)) for heads in (num_q, num_kv, num_kv))


# ---- CUDA: the library's fused kernels --------------------------------------------------------------------------


def _library_kernel_takes(qkv: Tensor, width: int) -> bool:
    """The fused kernels take heads up to 256 wide, a multiple of 8; the reference serves the rest."""
    return qkv.dtype in (torch.bfloat16, torch.float16, torch.float32) and width % 8 == 0 and width <= 256


def _memory_efficient(qkv: Tensor, mask: Optional[Tensor]) -> bool:
    """Masks and FP32 are for the memory-efficient kernel; the faster ones take neither."""
    return mask is not None or qkv.dtype == torch.float32


def _additive(mask: Optional[Tensor], dtype: torch.dtype, batch: int, num_q: int, sequence: int) -> Optional[Tensor]:
    """Mask as the memory-efficient kernel wants it: additive, rows aligned to 16 bytes, expanded to all heads.

    Hidden keys get the dtype's most negative number, not -inf, so that an all-hidden row stays finite.
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    aligned = torch.nn.functional.pad(mask.to(dtype), (0, -sequence % 16))[..., :sequence]
    return aligned.expand(batch, num_q, sequence, sequence)


def _repeat_kv(x: Tensor, ratio: int) -> Tensor:
    return x if ratio == 1 else x.repeat_interleave(ratio, dim=1)


def _cudnn_takes(qkv: Tensor, sequence: int, width: int) -> bool:
    """Where cuDNN's attention runs, and runs faster than FlashAttention: Hopper and newer, heads up to 128 wide."""
    if torch.are_deterministic_algorithms_enabled() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return width <= 128 and sequence > 1 and torch.cuda.get_device_capability(qkv.device) >= (9, 0)


@attention.cuda
def _(qkv, mask, batch, num_q, num_kv, scale):
    # cuDNN takes heads that lie apart, but crashes on elements that do.
    qkv = qkv.contiguous()
    q, k, v = _heads(qkv, batch, num_q, num_kv)
    sequence, width = q.shape[2], q.shape[3]
    if not _library_kernel_takes(qkv, width):
        return attention.reference(qkv, mask, batch, num_q, num_kv, scale)
    if _memory_efficient(qkv, mask):
        ratio = num_q // num_kv
        bias = _additive(mask, qkv.dtype, batch, num_q, sequence)
        o, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, _repeat_kv(k, ratio), _repeat_kv(v, ratio), bias, True, 0.0, mask is None, scale=scale
        )
    elif _cudnn_takes(qkv, sequence, width):
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=scale
        )
        lse = lse.squeeze(-1)
    else:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
    return _tokens_first(o), lse[..., :sequence].contiguous()


@attention_backward.cuda
def _(do, qkv, o, lse, mask, batch, num_q, num_kv, scale):
    do, qkv, o = do.contiguous(), qkv.contiguous(), o.contiguous()
    q, k, v = _heads(qkv, batch, num_q, num_kv)
    sequence, width = q.shape[2], q.shape[3]
    if not _library_kernel_takes(qkv, width):
        return attention_backward.reference(do, qkv, o, lse, mask, batch, num_q, num_kv, scale)
    do_, o_ = (x.view(batch, sequence, num_q, width).transpose(1, 2) for x in (do, o))
    # Without dropout the kernels read no random state; their schemas want the tensors all the same.
    unused = torch.zeros((), dtype=torch.int64, device=qkv.device)
    if _memory_efficient(qkv, mask):
        ratio = num_q // num_kv
        bias = _additive(mask, qkv.dtype, batch, num_q, sequence)
        lse = torch.nn.functional.pad(lse, (0, -sequence % 32))
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            do_, q, _repeat_kv(k, ratio), _repeat_kv(v, ratio), bias, o_, lse, unused, unused, 0.0,
            [True, True, True, False], mask is None, scale=scale,
        )  # fmt: skip
        if ratio > 1:
            dk, dv = (x.unflatten(1, (num_kv, ratio)).sum(2) for x in (dk, dv))
    elif _cudnn_takes(qkv, sequence, width):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do_, q, k, v, o_, lse.unsqueeze(-1), unused, unused, None, None, None, sequence, sequence, 0.0, True,
            scale=scale,
        )  # fmt: skip
    else:
        rng = torch.zeros(2, dtype=torch.uint64, device=qkv.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do_, q, k, v, o_, lse, None, None, sequence, sequence, 0.0, True, rng, unused, scale=scale
        )
    return _token_rows(qkv.dtype, dq, dk, dv)
