"""The gradient of the fused q/k/v buffer straight in FP8: rotated back and quantized, in two passes; no head norms.

The first finds max |gradient| (and the gradient's sums over the tokens, where q, k and v have biases), the second
writes both layouts. Bytes moved, with V = T * (num_q + 2 num_kv) * D * 2, the fused buffer (3 U for multi-head
attention):

    qk_rope_backward_amax       1 V read
    qk_rope_backward_amax_sums  1 V read; programs' sums, 1/16 V, written and read again
    qk_rope_backward_quantize   1 V read, 1/2 V + 1/2 V written

Everything equals the reference bit for bit, but for the sums over the tokens: a tile's own first, then the tiles'
(partials.py), always in the same order.

Legend: T tokens, D head width, E = D / 2, EP = E rounded up to a power of 2, P = T rounded up to a multiple of 16, C
columns of the buffer, NH heads of a tile.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from overcoat.formats import FLOAT8, quantize_tensor
from overcoat.kernels.device import EXACT, inverse_max, inverse_of, pack_rows, power_of_2, scale_of, to_float8
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import kernel, on_device
from overcoat.kernels.op import op
from overcoat.kernels.partials import sum_partials
from overcoat.kernels.quantize import padded_tokens, transpose_padded
from overcoat.kernels.rope import load_tables
from overcoat.kernels.rope_backward import (
    BACKWARD_TILE,
    backward_grid,
    gradient_arguments,
    launch_gradient,
    load_rotated_back,
    rope_gradient,
)


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
    return launch_gradient(dq, dk, dv, cos, sin, num_q, None)


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
    columns = dq.shape[1] + dk.shape[1] + dv.shape[1]
    partial = torch.empty((backward_grid(dq.shape[0], num_q)[0], columns), dtype=torch.float32, device=dq.device)
    top = launch_gradient(dq, dk, dv, cos, sin, num_q, partial, sums=True)
    (total,) = sum_partials(partial)
    return top, total


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


@qk_rope_backward_quantize.cuda
def _(dq, dk, dv, cos, sin, amax, fmt, num_q):
    padded, columns = padded_tokens(dq.shape[0]), dq.shape[1] + dk.shape[1] + dv.shape[1]
    out = torch.empty((dq.shape[0], columns), dtype=FLOAT8[fmt].dtype, device=dq.device)
    out_t = torch.empty((columns, padded), dtype=out.dtype, device=dq.device)
    scale = torch.empty_like(amax)
    pointers, sizes = gradient_arguments(dq, dk, dv, cos, sin, num_q)
    with on_device(dq):
        _rope_quantize_kernel[backward_grid(padded, num_q)](
            *pointers, amax, out, out_t.view(torch.int16), scale, padded, *sizes,
            inverse_max(fmt), power_of_2(cos.shape[1] // 2), *BACKWARD_TILE, num_warps=4, **EXACT,
        )  # fmt: skip
    return out, out_t, scale
