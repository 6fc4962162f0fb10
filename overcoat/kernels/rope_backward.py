"""Backward of `qk_rope`: the gradient of the fused q/k/v buffer rotated back, and through the head norms if there are.

Straight in FP8, without head norms: rope_quantize.py. Bytes moved, with V = T * (num_q + 2 num_kv) * D * 2, the fused
buffer (3 U for multi-head attention): 1 V read, 1 V written, and q and k of the norm's input read (2/3 V).

Programs walk along the tokens: each takes every Q-th tile of tokens with all of its heads, so that
grouped queries leave none with less to do. The norm's sums are taken in another order than PyTorch's, so the gradient
may differ from the reference's by one BF16 step; v, and a q or k without norm, equal it bit for bit. The weights'
gradients are deterministic: each program adds up its own heads, partials.py adds the programs' sums in a fixed order.

Legend: T tokens, D head width, E = D / 2, EP = E rounded up to a power of 2, Q programs. A tile with head norms has R
rows, a row is one head of one token: NH heads (a power of 2) of BT = R / NH tokens.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.kernels.device import EXACT, power_of_2
from overcoat.kernels.heads import (
    buffer_columns,
    gradient_arguments,
    load_halves,
    load_rotated_back,
    load_tables,
    rotate_back,
    split_heads,
    store_halves,
)
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, kernel
from overcoat.kernels.op import op
from overcoat.kernels.partials import sum_partials

# Elements of a tile, each half of a head in EP of them, and the most heads of one token in it: few, so that 28 or 8
# heads leave no rows empty, yet enough to read whole 1 KiB stretches at D = 128.
TILE = 2048
MAX_HEADS = 4
# As many programs of 4 warps as an H200's 132 multiprocessors hold at once with so many registers per thread.
REGISTERS = 128
RESIDENT = 132 * 65536 // (REGISTERS * 128)


def _head_norm_backward(dy: Tensor, x: Tensor, weight: Optional[Tensor], eps: float) -> Tuple[Tensor, Tensor]:
    if weight is None:
        return dy, dy.new_zeros(0)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    xhat, g = x * rstd, dy * weight.float()
    return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True)), (dy * xhat).sum((0, 1))


@op
def qk_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Optional[Tensor], cos: Tensor, sin: Tensor, q_weight: Optional[Tensor],
    k_weight: Optional[Tensor], eps: float, num_q: int,
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradient of qkv (T, (num_q + 2 num_kv) * D), and of the head norms' weights, (D,) FP32 or empty.

    Args:
        dq: (T, num_q * D); dk, dv: (T, num_kv * D): gradients of the rotated q and k, and of v.
        qkv: `qk_rope`'s input, needed only with head norms.
    """
    width, num_kv = dq.shape[1] // num_q, dk.shape[1] // (dq.shape[1] // num_q)
    gq, gk, gv = (part.contiguous().unflatten(1, (-1, width)).float() for part in (dq, dk, dv))
    q, k, _ = (gq, gk, gv) if qkv is None else split_heads(qkv, num_q, num_kv)
    gq, dq_weight = _head_norm_backward(rotate_back(gq, cos, sin), q, q_weight, eps)
    gk, dk_weight = _head_norm_backward(rotate_back(gk, cos, sin), k, k_weight, eps)
    return torch.cat((gq, gk, gv), 1).flatten(1).to(dq.dtype), dq_weight, dk_weight


@qk_rope_backward.fake
def _(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps, num_q):
    empty = dq.new_empty(0, dtype=torch.float32)
    dq_weight = empty if q_weight is None else torch.empty_like(q_weight, dtype=torch.float32)
    dk_weight = torch.empty_like(empty) if k_weight is None else torch.empty_like(k_weight, dtype=torch.float32)
    return dq.new_empty(dq.shape[0], buffer_columns(dq, dk, dv)), dq_weight, dk_weight


@triton.jit
def _norm_backward(d1, d2, x1, x2, w1, w2, known, D, eps):
    """Of rows' RMSNorm (R, EP) + (R, EP): gradients of input and of weight, apart per row; 0 where not `known` (R,)."""
    share = 1.0 / D
    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) * share + eps)
    rstd = tl.where(known, rstd, 0.0)[:, None]  # eps may be 0, rstd of a row of zeros infinite
    x1, x2 = x1 * rstd, x2 * rstd
    g1, g2 = d1 * w1, d2 * w2
    mean = (tl.sum(g1 * x1 + g2 * x2, 1) * share)[:, None]
    return rstd * (g1 - x1 * mean), rstd * (g2 - x2 * mean), d1 * x1, d2 * x2


@triton.jit
def _part_backward(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, partial_ptr, heads, stride_dy, ROTATE: tl.constexpr, NORM: tl.constexpr,
    cos_ptr, sin_ptr, T, positions, D: tl.constexpr, width, eps,
    EP: tl.constexpr, BT: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    """One program's share of q, k or v; x and dx are columns of the fused buffer, `width` wide."""
    E = D // 2
    row, e = tl.arange(0, BT * NH), tl.arange(0, EP)
    t, lane = row // NH, row % NH
    real = e < E
    if NORM:
        w1, w2 = load_halves(weight_ptr + e, E, real)
        w1, w2 = w1[None, :], w2[None, :]
        dw1, dw2 = tl.zeros((BT * NH, EP), tl.float32), tl.zeros((BT * NH, EP), tl.float32)
    for t0 in range(tl.program_id(0) * BT, T, tl.num_programs(0) * BT):
        start = tl.cast(t0, tl.int64)
        in_time = t < T - t0
        inside = in_time[:, None] & real[None, :]
        tables = load_tables(cos_ptr, sin_ptr, (t0 + t) % positions, e, inside, D, E)
        for head0 in range(0, heads, NH):
            known = in_time & (head0 + lane < heads)
            inside = known[:, None] & real[None, :]
            column = (head0 + lane) * D
            source = (t * stride_dy + column)[:, None] + e[None, :]
            place = (t * width + column)[:, None] + e[None, :]
            d1, d2 = load_rotated_back(dy_ptr + start * stride_dy, source, E, inside, *tables, ROTATE)
            if NORM:
                x1, x2 = load_halves(x_ptr + start * width + place, E, inside)
                d1, d2, product1, product2 = _norm_backward(d1, d2, x1, x2, w1, w2, known, D, eps)
                dw1 += product1
                dw2 += product2
            store_halves(dx_ptr + start * width + place, E, d1, d2, inside)
    if NORM:
        store_halves(partial_ptr + tl.program_id(0) * D + e, E, tl.sum(dw1, 0), tl.sum(dw2, 0), real)


@kernel
def _rope_backward_kernel(
    dq_ptr,  # (T, num_q * D), row stride `stride_q`: gradient of the rotated q
    dk_ptr,  # (T, num_kv * D), row stride `stride_k`: of the rotated k
    dv_ptr,  # (T, num_kv * D), row stride `stride_v`: of v
    cos_ptr,  # (positions, D)
    sin_ptr,  # (positions, D)
    qkv_ptr,  # (T, (num_q + 2 num_kv) * D): before norm and rotation; v is not read
    q_weight_ptr,  # (D,), if Q_NORM
    k_weight_ptr,  # (D,), if K_NORM
    out_ptr,  # (T, (num_q + 2 num_kv) * D)
    q_partial_ptr,  # (Q, D) FP32: each program's sums, if Q_NORM
    k_partial_ptr,  # (Q, D) FP32, if K_NORM
    T, positions, num_q, num_kv, D: tl.constexpr, stride_q, stride_k, stride_v, eps, Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr, EP: tl.constexpr, R: tl.constexpr,
    NHQ: tl.constexpr,  # NH of q
    NHK: tl.constexpr,  # NH of k and v
):  # fmt: skip
    k, v = num_q * D, (num_q + num_kv) * D
    shared = (cos_ptr, sin_ptr, T, positions, D, (num_q + 2 * num_kv) * D, eps)
    _part_backward(
        dq_ptr, qkv_ptr, q_weight_ptr, out_ptr, q_partial_ptr, num_q, stride_q, True, Q_NORM,
        *shared, EP, R // NHQ, NHQ,
    )  # fmt: skip
    _part_backward(
        dk_ptr, qkv_ptr + k, k_weight_ptr, out_ptr + k, k_partial_ptr, num_kv, stride_k, True, K_NORM,
        *shared, EP, R // NHK, NHK,
    )  # fmt: skip
    _part_backward(
        dv_ptr, qkv_ptr + v, k_weight_ptr, out_ptr + v, k_partial_ptr, num_kv, stride_v, False, False,
        *shared, EP, R // NHK, NHK,
    )  # fmt: skip


@qk_rope_backward.cuda
def _(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps, num_q):
    pointers, sizes = gradient_arguments(dq, dk, dv, cos, sin, num_q)
    tokens, width = dq.shape[0], cos.shape[1]
    num_kv, half = dk.shape[1] // width, power_of_2(width // 2)
    rows = max(TILE // (2 * half), 1)
    heads_q, heads_kv = (min(power_of_2(heads), MAX_HEADS, rows) for heads in (num_q, num_kv))
    programs = min(cdiv(tokens, rows // max(heads_q, heads_kv)), RESIDENT)
    out = dq.new_empty(tokens, buffer_columns(dq, dk, dv))
    partials = [
        dq.new_empty(0 if weight is None else programs, width, dtype=torch.float32) for weight in (q_weight, k_weight)
    ]
    _rope_backward_kernel[(programs,)](
        *pointers, *[pointers[3] if x is None else x.contiguous() for x in (qkv, q_weight, k_weight)], out, *partials,
        *sizes, eps, q_weight is not None, k_weight is not None, half, rows, heads_q, heads_kv,
        num_warps=4, maxnreg=REGISTERS, **EXACT,
    )  # fmt: skip
    pairs = tuple(zip(partials, (q_weight, k_weight), strict=True))
    found = [partial for partial, weight in pairs if weight is not None]
    sums = iter(sum_partials(*found) if found else ())
    dq_weight, dk_weight = (partial.view(0) if weight is None else next(sums) for partial, weight in pairs)
    return out, dq_weight, dk_weight
