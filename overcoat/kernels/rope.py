"""Rotary position embedding on the fused q/k/v buffer, with the optional per-head norm of q and k (Qwen3).

The buffer's columns are [q heads | k heads | v heads], each head D wide. With (x1, x2) the two halves of a head,

    rotate((x1, x2)) = (x1 * cos1 - x2 * sin1,  x2 * cos2 + x1 * sin2)

and, where the model normalises q and k, each head passes RMSNorm first: x <- x * rstd * weight. v passes unchanged.
The backward is the transposed map (not the inverse: scaled RoPE variants fold a factor into cos and sin).

The op is cheap to run again, so attention keeps its *input* in 8 bits, one group per token and head, and rebuilds the
rotated q and k in the backward.

Legend: T tokens = batch * sequence, D head width, P positions in cos and sin (P = T, or the sequence length when all
batch rows share them: token t uses row t mod P).
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.kernels.catalogue import op


def _split(qkv: Tensor, num_q: int, num_kv: int) -> Tuple[Tensor, Tensor, Tensor]:
    heads = qkv.view(qkv.shape[0], num_q + 2 * num_kv, -1).float()
    q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
    return q, k, v


def _per_token(table: Tensor, tokens: int) -> Tensor:
    """cos or sin (P, D) as (T, 1, D) FP32."""
    return table.float().repeat(tokens // table.shape[0], 1).unsqueeze(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


def _rotate_transposed(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    s1, s2 = (dy * sin).chunk(2, -1)
    return dy * cos + torch.cat((s2, -s1), -1)


def _head_norm(x: Tensor, weight: Optional[Tensor], eps: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _head_norm_backward(dy: Tensor, x: Tensor, weight: Optional[Tensor], eps: float) -> Tuple[Tensor, Tensor]:
    if weight is None:
        return dy, dy.new_zeros(0)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    xhat, g = x * rstd, dy * weight.float()
    return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True)), (dy * xhat).sum((0, 1))


@op
def qk_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    eps: float,
    num_q: int,
    num_kv: int,
) -> Tensor:
    """Normalise (if weights are given) and rotate q and k.

    Args:
        qkv: (T, (num_q + 2 num_kv) * D).
        cos, sin: (P, D).
        q_weight, k_weight: (D,) or None; eps: of their RMSNorm.

    Returns:
        the same shape and dtype as qkv.
    """
    q, k, v = _split(qkv, num_q, num_kv)
    c, s = _per_token(cos, qkv.shape[0]), _per_token(sin, qkv.shape[0])
    q = _rotate(_head_norm(q, q_weight, eps), c, s)
    k = _rotate(_head_norm(k, k_weight, eps), c, s)
    return torch.cat((q, k, v), 1).flatten(1).to(qkv.dtype)


@qk_rope.fake
def _(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv):
    return qkv.new_empty(qkv.shape)


@op
def qk_rope_backward(
    dqkv: Tensor,
    qkv: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    eps: float,
    num_q: int,
    num_kv: int,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Backward of `qk_rope`.

    Args:
        dqkv: (T, ...) gradient of its result; qkv: its input, needed only with head norms.

    Returns:
        gradient of qkv; dq_weight, dk_weight (D,) FP32 (empty without head norms).
    """
    dq, dk, dv = _split(dqkv, num_q, num_kv)
    c, s = _per_token(cos, dqkv.shape[0]), _per_token(sin, dqkv.shape[0])
    q, k, _ = _split(dqkv if qkv is None else qkv, num_q, num_kv)
    dq, dq_weight = _head_norm_backward(_rotate_transposed(dq, c, s), q, q_weight, eps)
    dk, dk_weight = _head_norm_backward(_rotate_transposed(dk, c, s), k, k_weight, eps)
    return torch.cat((dq, dk, dv), 1).flatten(1).to(dqkv.dtype), dq_weight, dk_weight


@qk_rope_backward.fake
def _(dqkv, qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv):
    empty = dqkv.new_empty(0, dtype=torch.float32)
    dq_weight = empty if q_weight is None else torch.empty_like(q_weight, dtype=torch.float32)
    dk_weight = torch.empty_like(empty) if k_weight is None else torch.empty_like(k_weight, dtype=torch.float32)
    return dqkv.new_empty(dqkv.shape), dq_weight, dk_weight
