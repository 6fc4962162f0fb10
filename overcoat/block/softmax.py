"""Softmax attention of rotated q, k and v, with what a model may do to its scores: caps, sinks, scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.block.context import context_attention, gathered
from overcoat.block.order import padded
from overcoat.block.spec import Tables
from overcoat.kernels.attention import attention as attention_op


class Heads(NamedTuple):
    """Shape of attention: batch, query heads, key/value heads, head width, softmax scale, eps of the q/k norm.

    full_norm: the q/k norm takes all heads of q together, and of k (OLMo 2), instead of each head (Qwen 3).
    causal: a token sees those before it, unless the mask is of all pairs.
    rotates: False: q and k stay as they are (SmolLM3's every fourth layer).
    rotated: how many of a head's columns rotate, the first ones (Phi); 0: all.
    neighbours: columns 2 i and 2 i + 1 rotate together, not i and i + rotated / 2 (GLM-4); a column of the tables
        stands twice in a row if also `rope_repeated` (Cohere).
    clip: q, k and v are limited to +- this before all else (OLMo); 0: not.
    softcap: scores are softcap * tanh(score / softcap) (Gemma 2); 0: not.
    window: a token sees the last `window` tokens up to its own alone, if causal (Mistral, Gemma 3); 0: all, or those of
        a mask of all pairs.
    context: the processes between which rows are cut (context.py), or None.
    """

    batch: int
    num_q: int
    num_kv: int
    width: int
    scale: float
    eps: float = 0.0
    full_norm: bool = False
    causal: bool = True
    rotates: bool = True
    rotated: int = 0
    rope_interleaved: bool = False
    rope_repeated: bool = False
    clip: float = 0.0
    softcap: float = 0.0
    window: int = 0
    context: Any = None


class Rotary(NamedTuple):
    """Shared by all layers: cos and sin (P, D), mask or None. Per layer: q/k norm weights (D,), or (heads * D,)
    where they take all heads together, or None; sinks (num_q,), scores that every query sees besides (gpt-oss);
    q_scale (P, 1), what q is multiplied by (Ministral 3)."""

    cos: Tensor
    sin: Tensor
    mask: Optional[Tensor] = None
    q_weight: Optional[Tensor] = None
    k_weight: Optional[Tensor] = None
    sinks: Optional[Tensor] = None
    q_scale: Optional[Tensor] = None


# Told of each layer's log-sum-exp (B, num_q, S) while somebody records them (models/recording.py).
observers: list[Any] = []


def rotary_of(tables: Tables, qk_norm: Sequence[Any], heads: Heads) -> Rotary:
    """What the kernels rotate by: columns i and i + D / 2 together, those that do not rotate by cos 1 and sin 0."""
    cos, sin, mask = tables
    if not heads.rotates:
        cos = cos.new_ones((1, heads.width))
        return Rotary(cos, torch.zeros_like(cos), mask, *qk_norm)
    pairs = (heads.rotated or heads.width) // 2
    if heads.rope_interleaved or 2 * pairs < heads.width or cos.shape[1] == pairs:
        cos, sin = (x[:, ::2] if heads.rope_repeated else x[:, :pairs] for x in (cos, sin))
        cos, sin = padded(cos, heads.width, 1.0), padded(sin, heads.width, 0.0)
    return Rotary(cos, sin, mask, *qk_norm)


def attend(
    rotated: Tensor, rotary: Rotary, heads: Heads, observed: bool = False, keys: Optional[Tensor] = None
) -> tuple[Tensor, Tensor]:
    """o and lse of rotated q, k and v, whose q is scaled where it lies; sinks are part of lse. keys: if known, those of
    all processes of `Heads.context`."""
    if rotary.q_scale is not None:
        scale_q(rotated[:, : heads.num_q * heads.width], rotary.q_scale)
    if heads.context is None:
        shape = (rotary.mask, heads.batch, heads.num_q, heads.num_kv, heads.scale)
        o, lse = attention_op(rotated, *shape, heads.causal, heads.softcap, heads.window)
    else:
        o, lse = context_attention(rotated, gathered(rotated, heads) if keys is None else keys, heads)
    if observed:
        _observe(lse)
    if rotary.sinks is None:
        return o, lse
    whole = torch.logaddexp(lse, rotary.sinks.float()[:, None])
    return _by_head(o, heads).mul((lse - whole).exp().transpose(1, 2).unsqueeze(3)).to(o.dtype).view_as(o), whole


def _by_head(x: Tensor, heads: Heads) -> Tensor:
    """(T, num_q * D) as (B, S, num_q, D)."""
    return x.view(heads.batch, -1, heads.num_q, heads.width)


def scale_q(q: Tensor, factor: Tensor) -> None:
    q.unflatten(0, (-1, factor.shape[0])).mul_(factor.to(q.dtype))


def sink_gradient(do: Tensor, o: Tensor, lse: Tensor, sinks: Tensor, heads: Heads) -> Tensor:
    """A sink has no value: its score's gradient is what the softmax takes from it, -P * sum_d(do * o)."""
    mean = (_by_head(do.float(), heads) * _by_head(o.float(), heads)).sum(3).transpose(1, 2)
    return -((sinks.float()[:, None] - lse).exp() * mean).sum((0, 2)).to(sinks.dtype)


def _observe(lse: Tensor) -> None:
    if not torch.compiler.is_compiling():
        for observer in observers:
            observer.note(lse)
