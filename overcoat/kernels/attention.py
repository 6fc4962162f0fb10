"""Softmax attention on the fused q/k/v buffer, forward and backward from (q, k, v, o, log-sum-exp).

    S = scale * q k^T + mask,  P = softmax(S),  o = P v,  lse = log sum exp S

The backward needs neither S nor P: with D = sum_d(do * o) per query,

    P = exp(S - lse),  dv = P^T do,  dS = P * (do v^T - D),  dq = scale * dS k,  dk = scale * dS^T q

so what attention keeps is q, k, v, o and lse, and the caller may hand them back decoded from 8 bits. Grouped-query
heads: query head i reads key/value head i // (num_q / num_kv).

The reference forms S in FP32. On CUDA the library's fused kernels run, chosen by rule (`chosen`): cuDNN's on Hopper and
newer where it takes the shape (1.7 times as fast as FlashAttention there: B4 S2048 32 x 128 heads, forward 0.27 ms
against 0.48, backward 0.83 against 1.39; with a mask 0.82 + 2.45 against the memory-efficient kernel's 2.20 + 5.68);
else FlashAttention, with a mask the memory-efficient one; packed sequences FlashAttention's for lengths (0.27 + 0.63);
and cuDNN never when `torch.use_deterministic_algorithms` asks for one result each time (it adds up dq in any order).
Measured on an H200 (docs/research/measurements.md).

Legend: B batch, S sequence length, D head width, T = B * S. Column layout of a fused buffer: [q heads | k | v].
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from overcoat.kernels.op import op
from overcoat.kernels.packed import dense_mask, flash_packed, flash_packed_backward, is_starts


def _heads(qkv: Tensor, batch: int, num_q: int, num_kv: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(T, (num_q + 2 num_kv) * D) -> views q (B, num_q, S, D), k and v (B, num_kv, S, D)."""
    heads = qkv.reshape(batch, qkv.shape[0] // batch, num_q + 2 * num_kv, -1).transpose(1, 2)
    q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
    return q, k, v


def _tokens_first(x: Tensor) -> Tensor:
    """(B, heads, S, D) -> (T, heads * D)."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1)


def _token_rows(dtype: torch.dtype, *parts: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Parts (B, heads, S, D), each as (T, heads * D) contiguous; a view where the kernel wrote tokens first."""
    dq, dk, dv = (_tokens_first(part).to(dtype) for part in parts)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, mask: Optional[Tensor], scale: float, causal: bool) -> Tensor:
    """FP32 scores (B, num_kv, R, S, S), R = num_q / num_kv; without a mask causal, or of all pairs."""
    if mask is not None and is_starts(mask):
        mask = dense_mask(mask, q.shape[0], q.shape[2], causal)
    q = q.float().unflatten(1, (k.shape[1], -1))
    scores = scale * (q @ k.float().unsqueeze(2).transpose(-1, -2))
    if mask is None and not causal:
        return scores
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
    qkv: Tensor, mask: Optional[Tensor], batch: int, num_q: int, num_kv: int, scale: float, causal: bool = True
) -> Tuple[Tensor, Tensor]:
    """Attention over rotated q, k, v.

    Args:
        qkv: (T, (num_q + 2 num_kv) * D).
        mask: None; or (B or 1, 1 or num_q, S, S), bool (True = visible) or additive; or where documents begin, int32
            (N + 1,) (packed.py).
        causal: whether a token sees only those before it, where the mask is not of all pairs.

    Returns:
        o (T, num_q * D) of qkv's dtype; lse FP32 (B, num_q, S).
    """
    q, k, v = _heads(qkv, batch, num_q, num_kv)
    scores = _scores(q, k, mask, scale, causal)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    o = _probabilities(scores, lse) @ v.float().unsqueeze(2)
    return _tokens_first(o.flatten(1, 2)).to(qkv.dtype), lse.squeeze(-1).flatten(1, 2)


@attention.fake
def _(qkv, mask, batch, num_q, num_kv, scale, causal=True):
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
    causal: bool = True,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (T, num_q * D), k and v (T, num_kv * D) from do (T, num_q * D)."""
    q, k, v = _heads(qkv, batch, num_q, num_kv)
    sequence = qkv.shape[0] // batch

    def grouped(x: Tensor) -> Tensor:
        return x.reshape(batch, sequence, num_q, -1).transpose(1, 2).float().unflatten(1, (num_kv, -1))

    do_, o_ = grouped(do), grouped(o)
    p = _probabilities(_scores(q, k, mask, scale, causal), lse.unflatten(1, (num_kv, -1)).unsqueeze(-1))
    dp = do_ @ v.float().unsqueeze(2).transpose(-1, -2)
    ds = p * (dp - (do_ * o_).sum(-1, keepdim=True)) * scale
    dq = (ds @ k.float().unsqueeze(2)).flatten(1, 2)
    dk = (ds.transpose(-1, -2) @ q.float().unflatten(1, (num_kv, -1))).sum(2)
    dv = (p.transpose(-1, -2) @ do_).sum(2)
    return _token_rows(qkv.dtype, dq, dk, dv)


@attention_backward.fake
def _(do, qkv, o, lse, mask, batch, num_q, num_kv, scale, causal=True):
    tokens, width = qkv.shape[0], qkv.shape[1] // (num_q + 2 * num_kv)
    return tuple(qkv.new_empty((tokens, heads * width)) for heads in (num_q, num_kv, num_kv))


# ---- CUDA: the library's fused kernels --------------------------------------------------------------------------


# What hides a key from cuDNN.
CUDNN_HIDDEN = -1e30


class Kernel(NamedTuple):
    """One of the library's fused kernels, q (B, num_q, S, D), k and v (B, num_kv, S, D), mask as `attention` takes it.

    forward   (q, k, v, mask, scale, causal) -> o (B, num_q, S, D), lse FP32 (B, num_q, S or more)
    backward  (do, q, k, v, o, lse, mask, scale, causal) -> dq, dk, dv, with lse (B, num_q, S)
    """

    forward: Callable[[Tensor, Tensor, Tensor, Optional[Tensor], float, bool], Tuple[Tensor, Tensor]]
    backward: Callable[..., Tuple[Tensor, Tensor, Tensor]]


def additive(
    mask: Tensor, dtype: torch.dtype, batch: int, num_q: int, sequence: int, hidden: Optional[float] = None
) -> Tensor:
    """Mask as the library's kernels want it: additive, rows aligned to 16 bytes, expanded to all heads.

    Hidden keys get the dtype's most negative number, not -inf, so that an all-hidden row stays finite; or `hidden`,
    below which nothing is left then. A boolean mask is written in one pass: every layer makes it anew, twice.
    """
    padded = mask.new_zeros if sequence % 16 else mask.new_empty
    rows = padded((*mask.shape[:-1], sequence + -sequence % 16), dtype=dtype)[..., :sequence]
    if mask.dtype == torch.bool:
        lowest = torch.finfo(dtype).min if hidden is None else hidden
        torch.where(mask, rows.new_zeros(()), rows.new_full((), lowest), out=rows)
    else:
        rows.copy_(mask)
        if hidden is not None:
            rows.clamp_(min=hidden)
    return rows.expand(batch, num_q, sequence, sequence)


def no_random_state(x: Tensor) -> Tensor:
    """Without dropout the kernels read no random state; their schemas want the tensors all the same."""
    return torch.empty((), dtype=torch.int64, device=x.device)


def _for_all_heads(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor]) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    batch, num_q, sequence, _ = q.shape
    if num_q > k.shape[1]:
        k, v = (x.repeat_interleave(num_q // k.shape[1], dim=1) for x in (k, v))
    return k, v, None if mask is None else additive(mask, q.dtype, batch, num_q, sequence)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], scale: float, causal: bool
) -> Tuple[Tensor, Tensor]:
    k, v, bias = _for_all_heads(q, k, v, mask)
    o, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, causal and mask is None, scale=scale
    )
    return o, lse


def _efficient_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: Optional[Tensor],
    scale: float,
    causal: bool,
) -> Tuple[Tensor, Tensor, Tensor]:
    num_kv, ratio = k.shape[1], q.shape[1] // k.shape[1]
    k, v, bias = _for_all_heads(q, k, v, mask)
    lse, unused = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32)), no_random_state(q)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, bias, o, lse, unused, unused, 0.0, [True, True, True, False], causal and mask is None, scale=scale
    )
    if ratio > 1:
        dk, dv = (x.unflatten(1, (num_kv, ratio)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _cudnn_bias(q: Tensor, mask: Optional[Tensor]) -> Optional[Tensor]:
    """An additive mask of one head or all.

    What hides a key is finite in FP32 also times log2(e): -inf would make NaN of a query that sees nothing.
    """
    if mask is None:
        return None
    batch, _, sequence, _ = q.shape
    return additive(mask, q.dtype, batch, mask.shape[1], sequence, hidden=CUDNN_HIDDEN)


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], scale: float, causal: bool
) -> Tuple[Tensor, Tensor]:
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, _cudnn_bias(q, mask), True, 0.0, causal and mask is None, False, scale=scale
    )
    return o, lse.squeeze(-1)


def _cudnn_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: Optional[Tensor],
    scale: float,
    causal: bool,
) -> Tuple[Tensor, Tensor, Tensor]:
    sequence, unused = q.shape[2], no_random_state(q)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse.unsqueeze(-1), unused, unused, _cudnn_bias(q, mask), None, None, sequence, sequence, 0.0,
        causal and mask is None, scale=scale,
    )  # fmt: skip


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], scale: float, causal: bool
) -> Tuple[Tensor, Tensor]:
    assert mask is None
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return o, lse


def _flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: Optional[Tensor],
    scale: float,
    causal: bool,
) -> Tuple[Tensor, Tensor, Tensor]:
    assert mask is None
    sequence, rng = q.shape[2], torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse, None, None, sequence, sequence, 0.0, causal, rng, no_random_state(q), scale=scale
    )


EFFICIENT = Kernel(_efficient, _efficient_backward)
CUDNN = Kernel(_cudnn, _cudnn_backward)
FLASH = Kernel(_flash, _flash_backward)
PACKED = Kernel(flash_packed, flash_packed_backward)


def _cudnn_takes(device: torch.device, sequence: int, width: int) -> bool:
    """Where cuDNN's attention runs, and runs faster than FlashAttention: Hopper and newer, heads up to 128 wide."""
    if torch.are_deterministic_algorithms_enabled() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return width <= 128 and sequence > 1 and torch.cuda.get_device_capability(device) >= (9, 0)


def chosen(q: Tensor, mask: Optional[Tensor]) -> Optional[Kernel]:
    """The rule: the kernel for q (B, num_q, S, D) on a GPU; None where the reference serves.

    The fused kernels take heads up to 256 wide, a multiple of 8. FP32 is for the memory-efficient one, and masks that
    cuDNN does not take. With a mask its backward on Hopper gives NaN for sequences of 64 tokens more than a multiple of
    128 (log-sum-exp below -88; PyTorch 2.11 to 2.13, pytorch issue 196678), so it gets none but multiples; and none in
    FP16, which has no number that hides a key and is finite.
    """
    sequence, width = q.shape[2:]
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or width % 8 or width > 256:
        return None
    if q.dtype == torch.float32:
        return EFFICIENT
    if is_starts(mask):
        # Asked for sequences of one token, FlashAttention takes a path for decoding, whose backward is wrong (dv).
        return PACKED if sequence > 1 else EFFICIENT
    if mask is None:
        return CUDNN if _cudnn_takes(q.device, sequence, width) else FLASH
    takes = sequence % 128 == 0 and q.dtype == torch.bfloat16 and _cudnn_takes(q.device, sequence, width)
    return CUDNN if takes else EFFICIENT


def forward_by(
    kernel: Kernel,
    qkv: Tensor,
    mask: Optional[Tensor],
    batch: int,
    num_q: int,
    num_kv: int,
    scale: float,
    causal: bool = True,
) -> Tuple[Tensor, Tensor]:
    """`attention` by one of the library's kernels; qkv contiguous."""
    q, k, v = _heads(qkv, batch, num_q, num_kv)
    o, lse = kernel.forward(q, k, v, _mask_for(kernel, mask, q, causal), scale, causal)
    return _tokens_first(o), lse[..., : q.shape[2]].contiguous()


def backward_by(
    kernel: Kernel,
    do: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: Optional[Tensor],
    batch: int,
    num_q: int,
    num_kv: int,
    scale: float,
    causal: bool = True,
) -> Tuple[Tensor, Tensor, Tensor]:
    """`attention_backward` by one of the library's kernels; do, qkv, o and lse contiguous."""
    q, k, v = _heads(qkv, batch, num_q, num_kv)
    do, o = (x.view(batch, q.shape[2], num_q, -1).transpose(1, 2) for x in (do, o))
    return _token_rows(
        qkv.dtype, *kernel.backward(do, q, k, v, o, lse, _mask_for(kernel, mask, q, causal), scale, causal)
    )


def _mask_for(kernel: Kernel, mask: Optional[Tensor], q: Tensor, causal: bool) -> Optional[Tensor]:
    """The mask as the kernel takes it: all but one want `starts` as a mask of all pairs."""
    if mask is None or kernel is PACKED or not is_starts(mask):
        return mask
    return dense_mask(mask, q.shape[0], q.shape[2], causal)


@attention.cuda
def _(qkv, mask, batch, num_q, num_kv, scale, causal=True):
    # cuDNN takes heads that lie apart, but crashes on elements that do.
    qkv = qkv.contiguous()
    kernel = chosen(_heads(qkv, batch, num_q, num_kv)[0], mask)
    if kernel is None:
        return attention.reference(qkv, mask, batch, num_q, num_kv, scale, causal)
    return forward_by(kernel, qkv, mask, batch, num_q, num_kv, scale, causal)


@attention_backward.cuda
def _(do, qkv, o, lse, mask, batch, num_q, num_kv, scale, causal=True):
    do, qkv, o, lse = (x.contiguous() for x in (do, qkv, o, lse))
    kernel = chosen(_heads(qkv, batch, num_q, num_kv)[0], mask)
    if kernel is None:
        return attention_backward.reference(do, qkv, o, lse, mask, batch, num_q, num_kv, scale, causal)
    return backward_by(kernel, do, qkv, o, lse, mask, batch, num_q, num_kv, scale, causal)
