"""Rotary position embedding on the fused q/k/v buffer, with the optional per-head norm of q and k (Qwen3).

The buffer's columns are [q heads | k heads | v heads], each head D wide. With (x1, x2) the two halves of a head,

    rotate((x1, x2)) = (x1 * cos1 - x2 * sin1,  x2 * cos2 + x1 * sin2)

and, where the model normalises q and k, each head passes RMSNorm first: x <- x * rstd * weight. v passes unchanged.
The backward is the transposed map (not the inverse: scaled RoPE variants fold a factor into cos and sin).

The op is cheap to run again, so attention keeps its *input*, q and k in 12 bits (bf12.py), v in 8, one group per
token and head, and rebuilds the rotated q and k in the backward.

Legend: T tokens = batch * sequence, D head width, P positions in cos and sin (P = T, or the sequence length when all
batch rows share them: token t uses row t mod P).
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.bf12 import decode_bf12, encode_bf12
from overcoat.catalogue import op
from overcoat.formats import FLOAT8, Quantized, decode_groups, encode_groups, group_code, quantize_tensor
from overcoat.kernels import gpu
from overcoat.kernels.quantize import padded_tokens, transpose_padded


def _split(qkv: Tensor, num_q: int, num_kv: int) -> Tuple[Tensor, Tensor, Tensor]:
    """The fused buffer's q, k and v (T, heads, D) in FP32."""
    count = num_q + 2 * num_kv
    heads = qkv.contiguous().view(qkv.shape[0], count, qkv.shape[1] // count).float()
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


@qk_rope.cuda
def _(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv):
    if (q_weight is None) != (k_weight is None):
        return qk_rope.reference(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv)
    return gpu.rope.qk_rope(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv)


@op
def qk_rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    eps: float,
    num_q: int,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Backward of `qk_rope`.

    Args:
        dq: (T, num_q * D); dk, dv: (T, num_kv * D): gradients of the rotated q and k, and of v.
        qkv: its input, needed only with head norms.

    Returns:
        gradient of qkv (T, (num_q + 2 num_kv) * D); dq_weight, dk_weight (D,) FP32 (empty without head norms).
    """
    tokens, width = dq.shape[0], dq.shape[1] // num_q
    gq, gk, gv = (part.contiguous().unflatten(1, (-1, width)).float() for part in (dq, dk, dv))
    c, s = _per_token(cos, tokens), _per_token(sin, tokens)
    q, k, _ = (gq, gk, gv) if qkv is None else _split(qkv, num_q, gk.shape[1])
    gq, dq_weight = _head_norm_backward(_rotate_transposed(gq, c, s), q, q_weight, eps)
    gk, dk_weight = _head_norm_backward(_rotate_transposed(gk, c, s), k, k_weight, eps)
    return torch.cat((gq, gk, gv), 1).flatten(1).to(dq.dtype), dq_weight, dk_weight


@qk_rope_backward.fake
def _(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps, num_q):
    empty = dq.new_empty(0, dtype=torch.float32)
    dq_weight = empty if q_weight is None else torch.empty_like(q_weight, dtype=torch.float32)
    dk_weight = torch.empty_like(empty) if k_weight is None else torch.empty_like(k_weight, dtype=torch.float32)
    return dq.new_empty((dq.shape[0], dq.shape[1] + dk.shape[1] + dv.shape[1])), dq_weight, dk_weight


@qk_rope_backward.cuda
def _(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps, num_q):
    if q_weight is not None or k_weight is not None:
        return gpu.rope_norm_backward.qk_rope_norm_backward(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps, num_q)
    none = dq.new_empty(0, dtype=torch.float32)
    return gpu.rope_backward.qk_rope_backward(dq, dk, dv, cos, sin, num_q), none, torch.empty_like(none)


# ---- fused with the kept codes, and with the quantization of the gradient ---------------------------------------


@op(mutates=("qkv",))
def qk_rope_encode12_(
    qkv: Tensor,
    center: Optional[Tensor],
    cos: Tensor,
    sin: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    eps: float,
    num_q: int,
    num_kv: int,
    code: str,
) -> Tuple[Tensor, Tensor, Tensor]:
    """`qk_rope` in place; returns what was there before: q and k as bf12, v - center (num_kv * D,) in the 8-bit `code`.

    Returns:
        codes int8 (T, (num_q + 2 num_kv) * D), the upper bits of q and k, then v's bytes; lower bits of q and k, uint8
        (T, (num_q + num_kv) * D/2); BF16 maxima (T, num_q + 2 num_kv).
    """
    heads = num_q + num_kv
    qk, v = qkv.contiguous().float().unflatten(1, (heads + num_kv, -1)).split((heads, num_kv), 1)
    upper, lower, qk_amax = encode_bf12(qk)
    v, v_amax = encode_groups(v if center is None else v - center.view(num_kv, -1), code, v.shape[2])
    codes = torch.cat((upper, v.view(torch.int8)), 1).flatten(1)
    qkv.copy_(qk_rope.reference(qkv, cos, sin, q_weight, k_weight, eps, num_q, num_kv))
    return codes, lower.flatten(1), torch.cat((qk_amax, v_amax.view(-1, num_kv)), 1)


@qk_rope_encode12_.fake
def _(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code):
    heads = num_q + 2 * num_kv
    lower = qkv.new_empty((qkv.shape[0], (num_q + num_kv) * (qkv.shape[1] // heads // 2)), dtype=torch.uint8)
    amax = qkv.new_empty((qkv.shape[0], heads), dtype=torch.bfloat16)
    return qkv.new_empty(qkv.shape, dtype=torch.int8), lower, amax


@qk_rope_encode12_.cuda
def _(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code):
    if (q_weight is None) != (k_weight is None):
        return qk_rope_encode12_.reference(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code)
    return gpu.rope.qk_rope_encode12_(qkv, center, cos, sin, q_weight, k_weight, eps, num_q, num_kv, code)


@op
def qk_rope_decode12(
    codes: Tensor,
    lower: Tensor,
    group_amax: Tensor,
    center: Optional[Tensor],
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    num_q: int,
    num_kv: int,
    code: str,
    dtype: torch.dtype,
) -> Tensor:
    """Decode q/k/v from `qk_rope_encode12_` and, if cos and sin are given, rotate q and k again; in `dtype`.

    Without head norms: `qk_rope` applies those to what was decoded without a rotation.
    """
    heads, tokens = num_q + num_kv, codes.shape[0]
    qk, v = codes.unflatten(1, (heads + num_kv, -1)).split((heads, num_kv), 1)
    qk = decode_bf12(qk, lower.view(tokens, heads, -1), group_amax[:, :heads])
    v = v.contiguous().view(group_code(code).dtype)
    v = decode_groups(Quantized(v, group_amax[:, heads:].reshape(-1, 1)), code, v.shape[2])
    values = torch.cat((qk, v if center is None else v + center.view(num_kv, -1)), 1).flatten(1)
    if cos is not None and sin is not None:
        values = qk_rope.reference(values, cos, sin, None, None, 0.0, num_q, num_kv)
    return values.to(dtype)


@qk_rope_decode12.fake
def _(codes, lower, group_amax, center, cos, sin, num_q, num_kv, code, dtype):
    return codes.new_empty(codes.shape, dtype=dtype)


@qk_rope_decode12.cuda
def _(codes, lower, group_amax, center, cos, sin, num_q, num_kv, code, dtype):
    return gpu.rope.qk_rope_decode12(codes, lower, group_amax, center, cos, sin, num_q, num_kv, code, dtype)


def rope_gradient(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int) -> Tensor:
    """Gradient of the fused buffer in FP32, without head norms."""
    parts = (dq.float(), dk.float(), dv.float())
    return qk_rope_backward.reference(*parts, None, cos, sin, None, None, 0.0, num_q)[0]


@op
def qk_rope_backward_amax(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int) -> Tensor:
    """First of two passes that write the gradient of q/k/v straight in FP8: its max |.|, 0-d FP32.

    Args:
        dq: (T, num_q * D); dk, dv: (T, num_kv * D): gradients of the rotated q and k, and of v. No head norms.
    """
    return rope_gradient(dq, dk, dv, cos, sin, num_q).abs().amax()


@qk_rope_backward_amax.fake
def _(dq, dk, dv, cos, sin, num_q):
    return dq.new_empty((), dtype=torch.float32)


@qk_rope_backward_amax.cuda
def _(dq, dk, dv, cos, sin, num_q):
    return gpu.rope_backward.qk_rope_backward_amax(dq, dk, dv, cos, sin, num_q)


@op
def qk_rope_backward_amax_sums(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int
) -> Tuple[Tensor, Tensor]:
    """`qk_rope_backward_amax`, and the same gradient's sums over the tokens, (C,) FP32: the biases' gradients."""
    gradient = rope_gradient(dq, dk, dv, cos, sin, num_q)
    return gradient.abs().amax(), gradient.sum(0)


@qk_rope_backward_amax_sums.fake
def _(dq, dk, dv, cos, sin, num_q):
    columns = dq.shape[1] + dk.shape[1] + dv.shape[1]
    return dq.new_empty((), dtype=torch.float32), dq.new_empty(columns, dtype=torch.float32)


@qk_rope_backward_amax_sums.cuda
def _(dq, dk, dv, cos, sin, num_q):
    return gpu.rope_backward.qk_rope_backward_amax_sums(dq, dk, dv, cos, sin, num_q)


@op
def qk_rope_backward_quantize(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, amax: Tensor, fmt: str, num_q: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """Second pass: the gradient in FP8 in both layouts, (T, C) and (C, P), and its scale for `amax`."""
    data, scale = quantize_tensor(rope_gradient(dq, dk, dv, cos, sin, num_q), FLOAT8[fmt], amax)
    return data, transpose_padded(data), scale


@qk_rope_backward_quantize.fake
def _(dq, dk, dv, cos, sin, amax, fmt, num_q):
    dtype = FLOAT8[fmt].dtype
    tokens, columns = dq.shape[0], dq.shape[1] + dk.shape[1] + dv.shape[1]
    transposed = dq.new_empty((columns, padded_tokens(tokens)), dtype=dtype)
    return dq.new_empty((tokens, columns), dtype=dtype), transposed, dq.new_empty((), dtype=torch.float32)


@qk_rope_backward_quantize.cuda
def _(dq, dk, dv, cos, sin, amax, fmt, num_q):
    padded = padded_tokens(dq.shape[0])
    return gpu.rope_backward.qk_rope_backward_quantize(dq, dk, dv, cos, sin, amax, fmt, num_q, padded)
