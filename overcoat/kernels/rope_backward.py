"""Backward of `qk_rope`: the gradient of the fused q/k/v buffer rotated back, and through the head norms if there are.

It is the transposed map, not the inverse: scaled RoPE variants fold a factor into cos and sin.

    (d1, d2) -> (d1 * cos1 + d2 * sin2,  d2 * cos2 - d1 * sin1)

Bytes moved, with V = T * (num_q + 2 num_kv) * D * 2, the fused buffer (3 U for multi-head attention): 1 V read, 1 V
written; with head norms q and k of the norm's input are read as well (2/3 V for multi-head attention).

Attention's backward leaves dq, dk and dv apart; one launch takes all three. Without head norms the third axis of its
grid tells them apart; each writes its columns of the fused buffer, and a tile takes several heads, which share the
tile's cos and sin. This equals the reference bit for bit.

With head norms programs walk along the tokens: each takes every Q-th tile of tokens with all of its heads, so that
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

from overcoat.kernels.device import EXACT, atomic_amax, larger, max_magnitude, power_of_2
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv, dense_rows, kernel, on_device
from overcoat.kernels.op import op
from overcoat.kernels.partials import sum_partials
from overcoat.kernels.rope import load_halves, load_tables, per_token, split_heads

# Tile of the backward: tokens, and heads that share the tables.
BACKWARD_TILE = (32, 8)
# Elements of a tile, each half of a head in EP of them, and the most heads of one token in it: few, so that 28 or 8
# heads leave no rows empty, yet enough to read whole 1 KiB stretches at D = 128.
TILE = 2048
MAX_HEADS = 4
# As many programs of 4 warps as an H200's 132 multiprocessors hold at once with so many registers per thread.
REGISTERS = 128
RESIDENT = 132 * 65536 // (REGISTERS * 128)


def _rotate_transposed(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    s1, s2 = (dy * sin).chunk(2, -1)
    return dy * cos + torch.cat((s2, -s1), -1)


def _head_norm_backward(dy: Tensor, x: Tensor, weight: Optional[Tensor], eps: float) -> Tuple[Tensor, Tensor]:
    if weight is None:
        return dy, dy.new_zeros(0)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    xhat, g = x * rstd, dy * weight.float()
    return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True)), (dy * xhat).sum((0, 1))


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
    c, s = per_token(cos, tokens), per_token(sin, tokens)
    q, k, _ = (gq, gk, gv) if qkv is None else split_heads(qkv, num_q, gk.shape[1])
    gq, dq_weight = _head_norm_backward(_rotate_transposed(gq, c, s), q, q_weight, eps)
    gk, dk_weight = _head_norm_backward(_rotate_transposed(gk, c, s), k, k_weight, eps)
    return torch.cat((gq, gk, gv), 1).flatten(1).to(dq.dtype), dq_weight, dk_weight


@qk_rope_backward.fake
def _(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps, num_q):
    empty = dq.new_empty(0, dtype=torch.float32)
    dq_weight = empty if q_weight is None else torch.empty_like(q_weight, dtype=torch.float32)
    dk_weight = torch.empty_like(empty) if k_weight is None else torch.empty_like(k_weight, dtype=torch.float32)
    return dq.new_empty((dq.shape[0], dq.shape[1] + dk.shape[1] + dv.shape[1])), dq_weight, dk_weight


def rope_gradient(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int) -> Tensor:
    """Gradient of the fused buffer in FP32, without head norms."""
    parts = (dq.float(), dk.float(), dv.float())
    return qk_rope_backward.reference(*parts, None, cos, sin, None, None, 0.0, num_q)[0]


# ---- without head norms; maxima and sums -----------------------------------------------------------------------------


@triton.jit
def load_rotated_back(dy_ptr, offsets, E, inside, cos1, cos2, sin1, sin2, ROTATE: tl.constexpr):
    """The halves (rows, EP) of heads' gradients in FP32; zero outside."""
    d1 = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    d2 = tl.load(dy_ptr + offsets + E, mask=inside, other=0.0).to(tl.float32)
    if ROTATE:
        d1, d2 = d1 * cos1 + d2 * sin2, d2 * cos2 - d1 * sin1
    return d1, d2


@triton.jit
def _gradient_tile(
    dy_ptr, out_ptr, heads, stride_dy, ROTATE: tl.constexpr,
    cos_ptr, sin_ptr, amax_ptr, T, positions, D, stride_out,
    VALUES: tl.constexpr, SUMS: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    """One program of `_rope_gradient_kernel` on one of its parts."""
    t0, E = tl.program_id(0) * BT, D // 2
    t, e = tl.arange(0, BT), tl.arange(0, EP)
    inside = (t < T - t0)[:, None] & (e < E)[None, :]
    tables = load_tables(cos_ptr, sin_ptr, (t0 + t) % positions, e, inside, D, E)
    top = tl.zeros((BT, EP), tl.float32)
    dy_ptr += t0.to(tl.int64) * stride_dy
    out_ptr += (tl.program_id(0) if SUMS else t0).to(tl.int64) * stride_out
    for head in range(tl.program_id(1) * NH, tl.minimum(tl.program_id(1) * NH + NH, heads)):
        source = t[:, None] * stride_dy + (head * D + e)[None, :]
        d1, d2 = load_rotated_back(dy_ptr, source, E, inside, *tables, ROTATE)
        if VALUES:
            target = out_ptr + (t[:, None] * stride_out + (head * D + e)[None, :])
            tl.store(target, d1.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(target + E, d2.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            top = larger(top, larger(tl.abs(d1), tl.abs(d2)))
        if SUMS:
            sums = out_ptr + head * D + e
            tl.store(sums, tl.sum(d1, 0), mask=e < E)
            tl.store(sums + E, tl.sum(d2, 0), mask=e < E)
    if not VALUES:
        atomic_amax(amax_ptr, max_magnitude(max_magnitude(top, 1), 0))


@kernel
def _rope_gradient_kernel(
    dq_ptr,  # (T, num_q * D), row stride `stride_q`: gradient of the rotated q
    dk_ptr,  # (T, num_kv * D), row stride `stride_k`: of the rotated k
    dv_ptr,  # (T, num_kv * D), row stride `stride_v`: of v
    cos_ptr,  # (positions, D)
    sin_ptr,  # (positions, D)
    out_ptr,  # (T, (num_q + 2 num_kv) * D), if VALUES; (tiles of tokens, as many) FP32: their sums, if SUMS
    amax_ptr,  # 0-d int32: bits of max |gradient|, unless VALUES
    T,
    positions,
    num_q,
    num_kv,
    D,
    stride_q,
    stride_k,
    stride_v,
    VALUES: tl.constexpr,
    SUMS: tl.constexpr,
    EP: tl.constexpr,
    BT: tl.constexpr,
    NH: tl.constexpr,
):
    shared = (cos_ptr, sin_ptr, amax_ptr, T, positions, D, (num_q + 2 * num_kv) * D)
    k, v = num_q * D, (num_q + num_kv) * D
    if tl.program_id(2) == 0:
        _gradient_tile(dq_ptr, out_ptr, num_q, stride_q, True, *shared, VALUES, SUMS, EP, BT, NH)
    elif tl.program_id(1) * NH < num_kv:
        if tl.program_id(2) == 1:
            _gradient_tile(dk_ptr, out_ptr + k, num_kv, stride_k, True, *shared, VALUES, SUMS, EP, BT, NH)
        else:
            _gradient_tile(dv_ptr, out_ptr + v, num_kv, stride_v, False, *shared, VALUES, SUMS, EP, BT, NH)


def backward_grid(tokens: int, num_q: int) -> tuple[int, int, int]:
    return cdiv(tokens, BACKWARD_TILE[0]), cdiv(num_q, BACKWARD_TILE[1]), 3


def gradient_arguments(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """What every kernel of the backward is given: dq, dk, dv, cos, sin; T, positions, num_q, num_kv, D, row strides."""
    parts, (positions, width) = [dense_rows(part) for part in (dq, dk, dv)], cos.shape
    strides = [part.stride(0) for part in parts]
    sizes = (dq.shape[0], positions, num_q, dk.shape[1] // width, width, *strides)
    return (*parts, cos.contiguous(), sin.contiguous()), sizes


def launch_gradient(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int, out: Optional[Tensor], sums: bool = False
) -> Tensor:
    """Run the kernel into out (T, (num_q + 2 num_kv) * D), or for the maximum, which is returned (else garbage).

    sums: for the maximum, and into out (tiles of tokens, (num_q + 2 num_kv) * D) for their sums.
    """
    values = out is not None and not sums
    bits = (torch.empty if values else torch.zeros)((), dtype=torch.int32, device=dq.device)
    pointers, sizes = gradient_arguments(dq, dk, dv, cos, sin, num_q)
    with on_device(dq):
        _rope_gradient_kernel[backward_grid(dq.shape[0], num_q)](
            *pointers, pointers[0] if out is None else out, bits, *sizes,
            values, sums, power_of_2(cos.shape[1] // 2), *BACKWARD_TILE, num_warps=4, **EXACT,
        )  # fmt: skip
    return bits.view(torch.float32)


# ---- with head norms -------------------------------------------------------------------------------------------------


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
    cos_ptr, sin_ptr, T, positions, D, width, eps,
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
                x = x_ptr + start * width + place
                x1 = tl.load(x, mask=inside, other=0.0).to(tl.float32)
                x2 = tl.load(x + E, mask=inside, other=0.0).to(tl.float32)
                d1, d2, product1, product2 = _norm_backward(d1, d2, x1, x2, w1, w2, known, D, eps)
                dw1 += product1
                dw2 += product2
            target = dx_ptr + start * width + place
            tl.store(target, d1.to(dx_ptr.dtype.element_ty), mask=inside)
            tl.store(target + E, d2.to(dx_ptr.dtype.element_ty), mask=inside)
    if NORM:
        mine = partial_ptr + tl.program_id(0) * D + e
        tl.store(mine, tl.sum(dw1, 0), mask=real)
        tl.store(mine + E, tl.sum(dw2, 0), mask=real)


@kernel
def _rope_norm_backward_kernel(
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
    T,
    positions,
    num_q,
    num_kv,
    D,
    stride_q,
    stride_k,
    stride_v,
    eps,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    EP: tl.constexpr,
    R: tl.constexpr,
    NHQ: tl.constexpr,  # NH of q
    NHK: tl.constexpr,  # NH of k and v
):
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


def _launch_norm_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Optional[Tensor],
    k_weight: Optional[Tensor],
    eps: float,
    num_q: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of qkv (T, (num_q + 2 num_kv) * D); of q's and k's weights (D,) FP32, empty where there is none."""
    pointers, sizes = gradient_arguments(dq, dk, dv, cos, sin, num_q)
    tokens, width = dq.shape[0], cos.shape[1]
    num_kv, half = dk.shape[1] // width, power_of_2(width // 2)
    rows = max(TILE // (2 * half), 1)
    heads_q, heads_kv = (min(power_of_2(heads), MAX_HEADS, rows) for heads in (num_q, num_kv))
    programs = min(cdiv(tokens, rows // max(heads_q, heads_kv)), RESIDENT)
    out = torch.empty(qkv.shape, dtype=dq.dtype, device=dq.device)
    partial_q, partial_k = (
        torch.empty((0 if weight is None else programs, width), dtype=torch.float32, device=dq.device)
        for weight in (q_weight, k_weight)
    )
    with on_device(dq):
        _rope_norm_backward_kernel[(programs,)](
            *pointers, qkv.contiguous(), cos if q_weight is None else q_weight.contiguous(),
            cos if k_weight is None else k_weight.contiguous(), out, partial_q, partial_k, *sizes, eps,
            q_weight is not None, k_weight is not None, half, rows, heads_q, heads_kv,
            num_warps=4, maxnreg=REGISTERS, **EXACT,
        )  # fmt: skip
    pairs = ((partial_q, q_weight), (partial_k, k_weight))
    sums = iter(sum_partials(*(partial for partial, weight in pairs if weight is not None)))
    dq_weight, dk_weight = (partial.view(0) if weight is None else next(sums) for partial, weight in pairs)
    return out, dq_weight, dk_weight


@qk_rope_backward.cuda
def _(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps, num_q):
    if q_weight is not None or k_weight is not None:
        return _launch_norm_backward(dq, dk, dv, qkv, cos, sin, q_weight, k_weight, eps, num_q)
    columns, none = dq.shape[1] + dk.shape[1] + dv.shape[1], dq.new_empty(0, dtype=torch.float32)
    out = torch.empty((dq.shape[0], columns), dtype=dq.dtype, device=dq.device)
    launch_gradient(dq, dk, dv, cos, sin, num_q, out)
    return out, none, torch.empty_like(none)
