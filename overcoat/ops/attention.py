"""`attention`: rotary embedding (and q/k norm), softmax attention, and what they keep for the backward.

Kept: the fused q/k/v buffer *before* the rotation, attention's output o, and the log-sum-exp. With
`Recipe.kept_attention="8bit"` q, k, v and o are codes with one group per token and head (2 U in all for multi-head
attention, less with grouped queries), after the vector that all tokens have in common is taken out: a bias or an
outlier channel cancels in attention's gradients, its quantization error would not. With "bf16" the 16-bit values are
kept (4 U). The forward computes on the exact values; only the backward reads the decoded ones, after rotating again.

o's codes are also outputs, so that the output projection (`linear_residual`) reuses them instead of keeping o.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.kernels.attention import attention as attention_op
from overcoat.kernels.attention import attention_backward as attention_backward_op
from overcoat.kernels.quantize import Encoded, group_decode, group_encode, token_center
from overcoat.kernels.rope import qk_rope, qk_rope_backward
from overcoat.memory import keep
from overcoat.recipe import Recipe


class Heads(NamedTuple):
    """Shape of attention: batch, query heads, key/value heads, head width, softmax scale, eps of the q/k norm."""

    batch: int
    num_q: int
    num_kv: int
    width: int
    scale: float
    eps: float = 0.0


class AttentionKept(NamedTuple):
    """q/k/v before rotation and o, as 8-bit codes with maxima and center (or 16-bit values and None), and lse."""

    lse: Tensor
    qkv: Tensor
    qkv_amax: Optional[Tensor]
    qkv_center: Optional[Tensor]
    o: Tensor
    o_amax: Optional[Tensor]
    o_center: Optional[Tensor]

    @property
    def encoded_o(self) -> Optional[Encoded]:
        """o in 8 bits, or None if it is kept in 16."""
        return None if self.o_amax is None else Encoded(self.o, self.o_amax, self.o_center)


class Rotary(NamedTuple):
    """Shared by all layers: cos and sin (P, D), mask or None. Per layer: q/k norm weights (D,) or None."""

    cos: Tensor
    sin: Tensor
    mask: Optional[Tensor] = None
    q_weight: Optional[Tensor] = None
    k_weight: Optional[Tensor] = None


def attention_forward(qkv: Tensor, rotary: Rotary, heads: Heads, recipe: Recipe) -> tuple[Tensor, AttentionKept]:
    """qkv (T, (num_q + 2 num_kv) * D) as the projections leave it -> o (T, num_q * D)."""
    cos, sin, mask, q_weight, k_weight = rotary
    rotated = qk_rope(qkv, cos, sin, q_weight, k_weight, heads.eps, heads.num_q, heads.num_kv)
    o, lse = attention_op(rotated, mask, heads.batch, heads.num_q, heads.num_kv, heads.scale)
    if recipe.kept_attention == "bf16":
        return o, AttentionKept(lse, qkv, None, None, o, None, None)
    return o, AttentionKept(lse, *_encode(qkv, recipe, heads.width), *_encode(o, recipe, heads.width))


def _encode(x: Tensor, recipe: Recipe, width: int) -> Encoded:
    center = token_center(x)
    codes, group_amax = group_encode(x, center, recipe.kept_format, width)
    return Encoded(codes, group_amax, center)


def attention_backward(
    do: Tensor, kept: AttentionKept, rotary: Rotary, heads: Heads, recipe: Recipe
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    """Gradients of qkv and of the q/k norm weights."""
    cos, sin, mask, q_weight, k_weight = rotary
    qkv, o, code = kept.qkv, kept.o, recipe.kept_format
    if kept.qkv_amax is not None:
        qkv = group_decode(qkv, kept.qkv_amax, kept.qkv_center, code, heads.width, do.dtype)
        o = group_decode(o, kept.o_amax, kept.o_center, code, heads.width, do.dtype)
    rotated = qk_rope(qkv, cos, sin, q_weight, k_weight, heads.eps, heads.num_q, heads.num_kv)
    drotated = attention_backward_op(
        do.contiguous(), rotated, o, kept.lse, mask, heads.batch, heads.num_q, heads.num_kv, heads.scale
    )
    inputs = None if q_weight is None and k_weight is None else qkv
    dqkv, dq_weight, dk_weight = qk_rope_backward(
        drotated, inputs, cos, sin, q_weight, k_weight, heads.eps, heads.num_q, heads.num_kv
    )
    return (
        dqkv,
        None if q_weight is None else dq_weight.to(q_weight.dtype),
        None if k_weight is None else dk_weight.to(k_weight.dtype),
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Optional[Tensor],
        q_weight: Optional[Tensor],
        k_weight: Optional[Tensor],
        heads: Heads,
        recipe: Recipe,
    ) -> tuple[Optional[Tensor], ...]:
        rotary = Rotary(cos, sin, mask, q_weight, k_weight)
        o, kept = attention_forward(qkv, rotary, heads, recipe)
        ctx.heads, ctx.recipe = heads, recipe
        keep(ctx, "attention", **kept._asdict(), **rotary._asdict())
        if kept.encoded_o is None:
            return o, None, None, None
        ctx.mark_non_differentiable(*kept.encoded_o)
        return o, *kept.encoded_o

    @staticmethod
    def backward(ctx: Any, do: Tensor, *_: None) -> tuple[Optional[Tensor], ...]:
        saved = ctx.saved_tensors
        dqkv, dq_weight, dk_weight = attention_backward(
            do, AttentionKept(*saved[:7]), Rotary(*saved[7:]), ctx.heads, ctx.recipe
        )
        return dqkv, None, None, None, dq_weight, dk_weight, None, None


def attention(qkv: Tensor, rotary: Rotary, heads: Heads, recipe: Recipe) -> tuple[Tensor, Optional[Encoded]]:
    """Rotary embedding and softmax attention.

    Args:
        qkv: (T, (num_q + 2 num_kv) * D), T = batch * sequence, columns [q heads | k heads | v heads].
        rotary: cos and sin (P, D) with P = T or the sequence length; mask None (causal) or (B or 1, 1 or num_q, S, S),
            bool with True = visible, or additive; q/k norm weights.
        heads: batch, head counts, head width D, softmax scale.

    Returns:
        o (T, num_q * D); its 8-bit form for `linear_residual` (None with `kept_attention="bf16"`).
    """
    o, *encoded = _Attention.apply(qkv, *rotary, heads, recipe)
    return o, None if encoded[0] is None else Encoded(*encoded)
