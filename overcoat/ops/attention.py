"""`attention`: rotary embedding (and q/k norm), softmax attention, and what they keep for the backward.

With `Recipe.kept_attention="8bit"` the fused q/k/v buffer *before* the rotation is kept, q and k in 12 bits, v in 8,
one group per token and head (2 U for multi-head attention, less with grouped queries).

q and k come back from 12 bits as they were (bf12.py), so the backward takes exp of the forward's own scores. An error
there grows with the scores: with 8 bits gradients explode once they pass about 100. v is off by its code's error, so
the backward also runs attention's forward again: dP - sum(do * o) cancels only if o is made of the same v. Then o need
not be kept. The vector that all tokens' v have in common is taken out before v is encoded: a bias or an outlier channel
cancels in attention's gradients, its quantization error would not.

With "bf16" the 16-bit q, k, v and o are kept, and the log-sum-exp (4 U).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overcoat.kernels.attention import attention as attention_op
from overcoat.kernels.attention import attention_backward as attention_backward_op
from overcoat.kernels.blockwise import BLOCK
from overcoat.kernels.groups import token_center
from overcoat.kernels.quantize import amax
from overcoat.kernels.rope import qk_rope, qk_rope_decode12, qk_rope_encode12_
from overcoat.kernels.rope_backward import qk_rope_backward
from overcoat.kernels.rope_blockwise import qk_rope_block_backward
from overcoat.kernels.rope_quantize import qk_rope_backward_amax, qk_rope_backward_amax_sums, qk_rope_backward_quantize
from overcoat.memory import keep
from overcoat.ops.blockwise import whole_blocks
from overcoat.ops.products import Gradient, quantize_gradient
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
    """q/k/v before rotation: codes, lower bits of q and k, maxima, center of v; or in 16 bits, with o and lse."""

    qkv: Tensor
    lower: Optional[Tensor] = None
    qkv_amax: Optional[Tensor] = None
    qkv_center: Optional[Tensor] = None
    o: Optional[Tensor] = None
    lse: Optional[Tensor] = None


class Rotary(NamedTuple):
    """Shared by all layers: cos and sin (P, D), mask or None. Per layer: q/k norm weights (D,) or None."""

    cos: Tensor
    sin: Tensor
    mask: Optional[Tensor] = None
    q_weight: Optional[Tensor] = None
    k_weight: Optional[Tensor] = None


def attention_forward(
    qkv: Tensor, rotary: Rotary, heads: Heads, recipe: Recipe, in_place: bool = False
) -> tuple[Tensor, Optional[Tensor], AttentionKept]:
    """qkv (T, (num_q + 2 num_kv) * D) as the projections leave it -> o (T, num_q * D), max |o| if known.

    With `in_place` qkv is the caller's to give: with 8-bit codes it is rotated where it lies.
    """
    cos, sin, mask, q_weight, k_weight = rotary
    tables = (cos, sin, q_weight, k_weight, heads.eps, heads.num_q, heads.num_kv)
    shape = (mask, heads.batch, heads.num_q, heads.num_kv, heads.scale)
    if recipe.kept_attention == "bf16":
        o, lse = attention_op(qk_rope(qkv, *tables), *shape)
        return o, None, AttentionKept(qkv, o=o, lse=lse)
    center = token_center(qkv[:, -heads.num_kv * heads.width :])
    qkv = qkv if in_place else qkv.clone()
    codes, lower, group_amax = qk_rope_encode12_(qkv, center, *tables, recipe.kept_format)
    o, _ = attention_op(qkv, *shape)
    return o, amax(o), AttentionKept(codes, lower, group_amax, center)


class Decoded(NamedTuple):
    """What attention's backward reads: rotated q/k/v, o and lse; with head norms also q/k/v before, else None."""

    rotated: Tensor
    o: Tensor
    lse: Tensor
    inputs: Optional[Tensor]


def attention_decode(kept: AttentionKept, rotary: Rotary, heads: Heads, recipe: Recipe, dtype: torch.dtype) -> Decoded:
    """What is kept as tensors of `dtype`, q and k rotated again; o and lse kept, or of these q, k and v."""
    cos, sin, mask, q_weight, k_weight = rotary
    tables = (cos, sin, q_weight, k_weight, heads.eps, heads.num_q, heads.num_kv)
    has_norms = q_weight is not None or k_weight is not None
    qkv = kept.qkv
    if kept.lower is None:
        assert kept.o is not None
        assert kept.lse is not None
        return Decoded(qk_rope(qkv, *tables), kept.o, kept.lse, qkv if has_norms else None)
    codes, last = kept[:4], (heads.num_q, heads.num_kv, recipe.kept_format, dtype)
    if has_norms:
        qkv = qk_rope_decode12(*codes, None, None, *last)
        rotated = qk_rope(qkv, *tables)
    else:
        rotated = qk_rope_decode12(*codes, cos, sin, *last)
    o, lse = attention_op(rotated, mask, heads.batch, heads.num_q, heads.num_kv, heads.scale)
    return Decoded(rotated, o, lse, qkv if has_norms else None)


def rotated_gradients(
    do: Tensor, decoded: Decoded, mask: Optional[Tensor], heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rotated q and k, and of v, from o's, do (T, num_q * D)."""
    rotated, o, lse, _ = decoded
    return attention_backward_op(
        do.contiguous(), rotated, o, lse, mask, heads.batch, heads.num_q, heads.num_kv, heads.scale
    )


def qkv_gradient(
    gradients: tuple[Tensor, Tensor, Tensor], inputs: Optional[Tensor], rotary: Rotary, heads: Heads
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    """Gradients of qkv and of the q/k norm weights, from `rotated_gradients` and `Decoded.inputs`."""
    cos, sin, _, q_weight, k_weight = rotary
    dqkv, dq_weight, dk_weight = qk_rope_backward(
        *gradients, inputs, cos, sin, q_weight, k_weight, heads.eps, heads.num_q
    )
    return (
        dqkv,
        None if q_weight is None else dq_weight.to(q_weight.dtype),
        None if k_weight is None else dk_weight.to(k_weight.dtype),
    )


def qkv_gradient_quantized(
    gradients: tuple[Tensor, Tensor, Tensor],
    rotary: Rotary,
    heads: Heads,
    biases: Sequence[Optional[Tensor]],
    recipe: Recipe,
) -> Gradient:
    """Gradient of qkv straight in both FP8 layouts, with its sums if there are biases; without q/k norms."""
    if recipe.linear_scaling == "block":
        return _quantized_in_blocks(gradients, rotary, heads, biases, recipe)
    arguments, sums = (*gradients, rotary.cos, rotary.sin), None
    if all(bias is None for bias in biases):
        top = qk_rope_backward_amax(*arguments, heads.num_q)
    else:
        top, sums = qk_rope_backward_amax_sums(*arguments, heads.num_q)
    data, transposed, scale = qk_rope_backward_quantize(*arguments, top, recipe.grad_format, heads.num_q)
    return Gradient(data, transposed, scale, sums, gradients[0].dtype)


def attention_backward(
    do: Tensor, kept: AttentionKept, rotary: Rotary, heads: Heads, recipe: Recipe
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    """Gradients of qkv and of the q/k norm weights."""
    decoded = attention_decode(kept, rotary, heads, recipe, do.dtype)
    gradients, inputs = rotated_gradients(do, decoded, rotary.mask, heads), decoded.inputs
    del decoded
    return qkv_gradient(gradients, inputs, rotary, heads)


def _quantized_in_blocks(
    gradients: tuple[Tensor, Tensor, Tensor],
    rotary: Rotary,
    heads: Heads,
    biases: Sequence[Optional[Tensor]],
    recipe: Recipe,
) -> Gradient:
    """Gradients of the rotated q and k, and of v -> gradient of qkv in both FP8 layouts with block scales."""
    cos, sin, dtype = rotary.cos, rotary.sin, gradients[0].dtype
    has_bias = any(bias is not None for bias in biases)
    if not has_bias and BLOCK % heads.width == 0 and whole_blocks(*(part.shape[1] for part in gradients)):
        data, scale, data_t, scale_t = qk_rope_block_backward(*gradients, cos, sin, recipe.grad_format, heads.num_q)
        return Gradient(data, data_t, scale, None, dtype, scale_t)
    dqkv, _, _ = qk_rope_backward(*gradients, None, cos, sin, None, None, heads.eps, heads.num_q)
    return quantize_gradient(dqkv, biases, recipe)


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
    ) -> Tensor:
        rotary = Rotary(cos, sin, mask, q_weight, k_weight)
        o, _, kept = attention_forward(qkv, rotary, heads, recipe)
        ctx.heads, ctx.recipe = heads, recipe
        keep(ctx, "attention", **kept._asdict(), **rotary._asdict())
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Optional[Tensor], ...]:
        saved = ctx.saved_tensors
        dqkv, dq_weight, dk_weight = attention_backward(
            do, AttentionKept(*saved[:6]), Rotary(*saved[6:]), ctx.heads, ctx.recipe
        )
        return dqkv, None, None, None, dq_weight, dk_weight, None, None


def attention(qkv: Tensor, rotary: Rotary, heads: Heads, recipe: Recipe) -> Tensor:
    """Rotary embedding and softmax attention.

    Args:
        qkv: (T, (num_q + 2 num_kv) * D), T = batch * sequence, columns [q heads | k heads | v heads].
        rotary: cos and sin (P, D) with P = T or the sequence length; mask None (causal) or (B or 1, 1 or num_q, S, S),
            bool with True = visible, or additive; or where packed documents begin, int32 (N + 1,)
            (kernels/packed.py); q/k norm weights.
        heads: batch, head counts, head width D, softmax scale.

    Returns:
        o (T, num_q * D).
    """
    return _Attention.apply(qkv, *rotary, heads, recipe)
