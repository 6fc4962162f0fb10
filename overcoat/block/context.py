"""Causal attention over rows that are split between the processes of a group (context parallelism).

A row of S tokens is split into 2 C chunks for C processes. Process r holds chunks r and 2 C - 1 - r, so all processes
have the same number of query-key pairs. A chunk's q attends to its own chunk, causally, and to all chunks before it:
two calls of the usual kernels. Their results are combined by their log-sum-exp:

    o = sum_i exp(lse_i - lse) o_i,   lse = log sum_i exp(lse_i)

Given this o and lse, the backward of each call yields summands of dq, dk and dv.

k and v are gathered, not passed around a ring: one collective a pass instead of C - 1, and one kernel call on long rows
instead of C on short ones. While a layer computes, its k and v of all processes take 4 * S * num_kv * D bytes a row in
16 bits: 0.5 GiB for 131,072 tokens and Llama-3's 8 heads of 128. Gradients of k and v are summed between processes in
FP32. Each process saves only its own tokens for the backward, in 8 to 12 bits as usual.

Legend: B rows, c tokens of a chunk, T = B * 2 c own tokens, S = 2 C c, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overcoat.kernels.attention import PLAIN, Kernel, Three, chosen, heads_of, token_rows

# The first name is PyTorch 2.13's, the second 2.11's.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_part(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this process' two chunks (B, 2 c, ...) of rows (B, S, ...)."""
    chunks, rank = rows.chunk(2 * group.size(), 1), group.rank()
    return torch.cat((chunks[rank], chunks[-1 - rank]), 1)


def gathered(qkv: Tensor, heads: Any) -> Tensor:
    """Return k and v of all processes (B, S, 2 num_kv * D), from this process' fused q/k/v buffer (T, ...)."""
    count = heads.context.size()
    own = qkv[:, heads.num_q * heads.width :].contiguous()
    found = own.new_empty((count, heads.batch, 2, len(own) // heads.batch // 2, own.shape[1]))
    _gather(found.view(-1), own.view(-1), group=heads.context)
    return torch.cat([*found[:, :, 0], *found[:, :, 1].unbind()[::-1]], 1)


def context_attention(qkv: Tensor, keys: Tensor, heads: Any) -> tuple[Tensor, Tensor]:
    """Return o (T, num_q * D) and lse FP32 (B, num_q, 2 c). qkv: rotated fused buffer; keys: `gathered` k and v."""
    results = []
    for (q, *_), pieces in _chunks(qkv, keys, heads):
        parts = [_kernel(q).forward((q, *kv), None, heads.scale, causal) for kv, causal, _ in pieces]
        results.append(_together([(o, lse[..., : q.shape[2]]) for o, lse in parts]))
    o, lse = (torch.cat(parts, 2) for parts in zip(*results, strict=True))
    return o.transpose(1, 2).reshape(len(qkv), -1), lse


def context_attention_backward(do: Tensor, qkv: Tensor, keys: Tensor, o: Tensor, lse: Tensor, heads: Any) -> Three:
    """Return the gradients of this process' q, k and v, (T, heads * D) each, from do (T, num_q * D)."""
    dkeys = keys.new_zeros(keys.shape, dtype=torch.float32)
    whole, dq = heads_of(dkeys.flatten(0, 1), heads.batch, 0, heads.num_kv)[1:], []
    for ((q, do_own, o_own), pieces), lse_own in zip(_chunks(qkv, keys, heads, do, o), lse.chunk(2, 2), strict=True):
        kernel, read, parts = _kernel(q), (o_own, lse_own.contiguous(), None, heads.scale), []
        for kv, causal, span in pieces:
            part, *dkv = kernel.backward(do_own, (q, *kv), *read, causal)
            parts.append(part.float())
            for total, gradient in zip(whole, dkv, strict=True):
                total[:, :, span] += gradient
        dq.append(sum(parts[1:], parts[0]))
    count = heads.context.size()
    chunks = dkeys.chunk(2 * count, 1)
    sent = torch.stack([torch.cat((chunks[rank], chunks[-1 - rank]), 1) for rank in range(count)])
    own = torch.empty_like(sent[0])
    _reduce_scatter(own.view(-1), sent.view(-1), group=heads.context)
    return token_rows(qkv.dtype, torch.cat(dq, 2), *heads_of(own.flatten(0, 1), heads.batch, 0, heads.num_kv)[1:])


def share_largest(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Take the maximum of FP32 numbers >= 0 over the group, in place.

    Their bits compare as integers in the same order, with NaN the largest, so NaN is not lost.
    """
    dist.all_reduce(value.view(torch.int32), dist.ReduceOp.MAX, group=group)
    return value


def _kernel(q: Tensor) -> Kernel:
    return (chosen(q, None) if q.is_cuda else None) or PLAIN


def _chunks(qkv: Tensor, keys: Tensor, heads: Any, *others: Tensor) -> Any:
    """Yield for each of the two own chunks its queries, and the pieces of keys that they attend to.

    Queries: q and `others` (T, num_q * D), each as (B, num_q, c, D). Pieces: the chunk itself (causal) and all tokens
    before it, each as ((k, v), causal, slice of the row).
    """
    group, batch = heads.context, heads.batch
    q, (k, v) = (
        heads_of(qkv, batch, heads.num_q, heads.num_kv)[0],
        heads_of(keys.flatten(0, 1), batch, 0, heads.num_kv)[1:],
    )
    queries = [q, *(heads_of(x.contiguous(), batch, heads.num_q, 0)[0] for x in others)]
    length = q.shape[2] // 2
    for half, chunk in enumerate((group.rank(), 2 * group.size() - 1 - group.rank())):
        spans = [(slice(chunk * length, (chunk + 1) * length), True), (slice(0, chunk * length), False)]
        pieces = [((k[:, :, span], v[:, :, span]), causal, span) for span, causal in spans[: 2 if chunk else 1]]
        yield [x[:, :, half * length : (half + 1) * length] for x in queries], pieces


def _together(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combine one or two (o, lse) of the same queries over different keys."""
    if len(parts) == 1:
        return parts[0]
    (o, lse), (other, other_lse) = parts
    both = torch.logaddexp(lse, other_lse)
    mixed = (lse - both).exp().unsqueeze(3) * o.float() + (other_lse - both).exp().unsqueeze(3) * other.float()
    return mixed.to(o.dtype), both
