"""Kernels of the backward in kernels/rope.py: the gradient of q/k/v rotated back, as it is or straight into FP8.

Bytes moved, with V = T * (num_q + 2 num_kv) * D * 2, the fused buffer (3 U for multi-head attention):

    qk_rope_backward            1 V read, 1 V written
    qk_rope_backward_amax       1 V read
    qk_rope_backward_amax_sums  1 V read; programs' sums, 1/16 V, written and read again
    qk_rope_backward_quantize   1 V read, 1/2 V + 1/2 V written: both FP8 layouts

Attention's backward leaves dq, dk and dv apart; one launch takes all three, told apart by the third axis of its grid.
Each writes its columns of the fused buffer (its rows of the transposed one). A tile takes several heads, which share
the tile's cos and sin. Everything equals the reference bit for bit, but for the sums over the tokens: a tile's own
first, then the tiles' (partials.py), always in the same order.

Legend: T tokens, D head width, E = D / 2, EP = E rounded up to a power of 2, P padded tokens, NH heads of a tile.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.formats import FLOAT8
from overcoat.kernels.gpu.common import (
    EXACT,
    atomic_amax,
    inverse_max,
    inverse_of,
    larger,
    max_magnitude,
    pack_rows,
    power_of_2,
    scale_of,
    to_float8,
)
from overcoat.kernels.gpu.launch import cdiv, dense_rows, kernel, on_device
from overcoat.kernels.gpu.partials import sum_partials
from overcoat.kernels.gpu.rope import load_tables


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


@triton.jit
def _scaled(d1, d2, inverse, inside):
    """Halves times `inverse`, which may be NaN; zero outside, where the transposed layout is padded."""
    return tl.where(inside, d1 * inverse, 0.0), tl.where(inside, d2 * inverse, 0.0)


@triton.jit
def _store_float8(out_ptr, offsets, E, d1, d2, inside):
    tl.store(out_ptr + offsets, to_float8(d1, out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + offsets + E, to_float8(d2, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _quantize_tile(
    dy_ptr, first, heads, stride_dy, ROTATE: tl.constexpr,
    cos_ptr, sin_ptr, out_ptr, out_t_ptr, inverse, T, P, positions, D, stride_out,
    EP: tl.constexpr, BT: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    """One program of `_rope_quantize_kernel` on one of its parts; `first`: its first column of the fused buffer."""
    t0, E = tl.program_id(0) * BT, D // 2
    pair, e = tl.arange(0, BT // 2), tl.arange(0, EP)
    t = 2 * pair
    even, odd = (t < T - t0)[:, None] & (e < E)[None, :], (t + 1 < T - t0)[:, None] & (e < E)[None, :]
    tables0 = load_tables(cos_ptr, sin_ptr, (t0 + t) % positions, e, even, D, E)
    tables1 = load_tables(cos_ptr, sin_ptr, (t0 + t + 1) % positions, e, odd, D, E)
    dy_ptr += t0.to(tl.int64) * stride_dy
    out_ptr += t0.to(tl.int64) * stride_out + first
    out_t_ptr += tl.cast(first, tl.int64) * (P // 2)
    for head in range(tl.program_id(1) * NH, tl.minimum(tl.program_id(1) * NH + NH, heads)):
        column = (head * D + e)[None, :]
        source = t[:, None] * stride_dy + column
        a1, a2 = _scaled(*load_rotated_back(dy_ptr, source, E, even, *tables0, ROTATE), inverse, even)
        b1, b2 = _scaled(*load_rotated_back(dy_ptr + stride_dy, source, E, odd, *tables1, ROTATE), inverse, odd)
        _store_float8(out_ptr, t[:, None] * stride_out + column, E, a1, a2, even)
        _store_float8(out_ptr + stride_out, t[:, None] * stride_out + column, E, b1, b2, odd)
        inside_t = (e < E)[:, None] & (pair < (P - t0) // 2)[None, :]
        target = out_t_ptr + tl.cast(head * D, tl.int64) * (P // 2) + t0 // 2
        target += e[:, None] * (P // 2) + pair[None, :]
        tl.store(target, tl.trans(pack_rows(a1, b1, out_ptr.dtype.element_ty)), mask=inside_t)
        tl.store(target + E * (P // 2), tl.trans(pack_rows(a2, b2, out_ptr.dtype.element_ty)), mask=inside_t)


@kernel
def _rope_quantize_kernel(
    dq_ptr,  # (T, num_q * D), row stride `stride_q`: gradient of the rotated q
    dk_ptr,  # (T, num_kv * D), row stride `stride_k`: of the rotated k
    dv_ptr,  # (T, num_kv * D), row stride `stride_v`: of v
    cos_ptr,  # (positions, D)
    sin_ptr,  # (positions, D)
    amax_ptr,  # 0-d FP32
    out_ptr,  # (T, (num_q + 2 num_kv) * D) FP8
    out_t_ptr,  # ((num_q + 2 num_kv) * D, P / 2) int16, pairs of FP8
    scale_ptr,  # 0-d FP32
    P,  # here: after the strides ptxas takes 166 registers at D = 128 instead of 128
    T,
    positions,
    num_q,
    num_kv,
    D,
    stride_q,
    stride_k,
    stride_v,
    INVERSE_MAX: tl.constexpr,
    EP: tl.constexpr,
    BT: tl.constexpr,
    NH: tl.constexpr,
):
    scale = scale_of(tl.load(amax_ptr), INVERSE_MAX)
    tl.store(scale_ptr, scale, mask=tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0)
    inverse = inverse_of(scale)
    shared = (cos_ptr, sin_ptr, out_ptr, out_t_ptr, inverse, T, P, positions, D, (num_q + 2 * num_kv) * D)
    k = num_q * D
    v = k + num_kv * D
    if tl.program_id(2) == 0:
        _quantize_tile(dq_ptr, 0, num_q, stride_q, True, *shared, EP, BT, NH)
    elif tl.program_id(1) * NH < num_kv:
        if tl.program_id(2) == 1:
            _quantize_tile(dk_ptr, k, num_kv, stride_k, True, *shared, EP, BT, NH)
        else:
            _quantize_tile(dv_ptr, v, num_kv, stride_v, False, *shared, EP, BT, NH)


# Tile of the backward: tokens, and heads that share the tables.
BACKWARD_TILE = (32, 8)


def _grid(tokens: int, num_q: int) -> tuple[int, int, int]:
    return cdiv(tokens, BACKWARD_TILE[0]), cdiv(num_q, BACKWARD_TILE[1]), 3


def gradient_arguments(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """What every kernel of the backward is given: dq, dk, dv, cos, sin; T, positions, num_q, num_kv, D, row strides."""
    parts, (positions, width) = [dense_rows(part) for part in (dq, dk, dv)], cos.shape
    strides = [part.stride(0) for part in parts]
    sizes = (dq.shape[0], positions, num_q, dk.shape[1] // width, width, *strides)
    return (*parts, cos.contiguous(), sin.contiguous()), sizes


def _launch_gradient(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int, out: Optional[Tensor], sums: bool = False
) -> Tensor:
    """Run the kernel into out (T, (num_q + 2 num_kv) * D), or for the maximum, which is returned (else garbage).

    sums: for the maximum, and into out (tiles of tokens, (num_q + 2 num_kv) * D) for their sums.
    """
    values = out is not None and not sums
    bits = (torch.empty if values else torch.zeros)((), dtype=torch.int32, device=dq.device)
    pointers, sizes = gradient_arguments(dq, dk, dv, cos, sin, num_q)
    with on_device(dq):
        _rope_gradient_kernel[_grid(dq.shape[0], num_q)](
            *pointers, pointers[0] if out is None else out, bits, *sizes,
            values, sums, power_of_2(cos.shape[1] // 2), *BACKWARD_TILE, num_warps=4, **EXACT,
        )  # fmt: skip
    return bits.view(torch.float32)


def qk_rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int) -> Tensor:
    """Gradient of the fused buffer (T, (num_q + 2 num_kv) * D), without head norms."""
    columns = dq.shape[1] + dk.shape[1] + dv.shape[1]
    out = torch.empty((dq.shape[0], columns), dtype=dq.dtype, device=dq.device)
    _launch_gradient(dq, dk, dv, cos, sin, num_q, out)
    return out


def qk_rope_backward_amax(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int) -> Tensor:
    """max |gradient of the fused buffer|, 0-d FP32."""
    return _launch_gradient(dq, dk, dv, cos, sin, num_q, None)


def qk_rope_backward_amax_sums(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, num_q: int
) -> tuple[Tensor, Tensor]:
    """max |gradient of the fused buffer|, 0-d FP32, and its sums over the tokens, FP32 ((num_q + 2 num_kv) * D,)."""
    columns = dq.shape[1] + dk.shape[1] + dv.shape[1]
    partial = torch.empty((_grid(dq.shape[0], num_q)[0], columns), dtype=torch.float32, device=dq.device)
    top = _launch_gradient(dq, dk, dv, cos, sin, num_q, partial, sums=True)
    (total,) = sum_partials(partial)
    return top, total


def qk_rope_backward_quantize(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, amax: Tensor, fmt: str, num_q: int, padded: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the fused buffer in FP8: (T, columns), transposed (columns, padded), and its scale."""
    columns = dq.shape[1] + dk.shape[1] + dv.shape[1]
    out = torch.empty((dq.shape[0], columns), dtype=FLOAT8[fmt].dtype, device=dq.device)
    out_t = torch.empty((columns, padded), dtype=out.dtype, device=dq.device)
    scale = torch.empty_like(amax)
    pointers, sizes = gradient_arguments(dq, dk, dv, cos, sin, num_q)
    with on_device(dq):
        _rope_quantize_kernel[_grid(padded, num_q)](
            *pointers, amax, out, out_t.view(torch.int16), scale, padded, *sizes,
            inverse_max(fmt), power_of_2(cos.shape[1] // 2), *BACKWARD_TILE, num_warps=4, **EXACT,
        )  # fmt: skip
    return out, out_t, scale
