"""The gradient of the fused q/k/v buffer straight to FP8 blocks: rotated back and quantized in both layouts, one pass.

Bytes moved, with Q = T * (num_q + 2 num_kv) * D * 2: 1 Q read, 1/2 Q + 1/2 Q written. Everything equals the reference
bit for bit.

Legend and layouts of operands: blockwise.py; D head width, E = D / 2.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from overcoat.formats import FLOAT8
from overcoat.kernels.block_tiles import quad_magnitude, row_amax, store_scaled_rows, store_scales, token_blocks
from overcoat.kernels.blockwise import BLOCK, empty_rows, empty_rows_t, row_blocks, row_blocks_t
from overcoat.kernels.device import EXACT, inverse_max, larger, scale_of, two_amax
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import dense_rows, kernel
from overcoat.kernels.op import op
from overcoat.kernels.rope_quantize import buffer_columns, rope_gradient
from overcoat.kernels.rotation import load_halves
from overcoat.kernels.tiles import store_quads

# By measurement (docs/research/kernels.md): columns of a thread, warps, registers.
ROPE_VECTOR, ROPE_WARPS, ROPE_REGISTERS = 8, 4, None


@op
def qk_rope_block_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, fmt: str, num_q: int
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of the fused q/k/v buffer rotated back, straight in FP8 in both layouts; no head norms.

    Args:
        dq: (T, num_q * D); dk, dv: (T, num_kv * D): gradients of the rotated q and k, and of v.
        cos, sin: (positions, D).

    Returns:
        as `block_quantize_both` of the buffer (T, (num_q + 2 num_kv) * D).
    """
    gradient = rope_gradient(dq, dk, dv, cos, sin, num_q)
    return *row_blocks(gradient, FLOAT8[fmt]), *row_blocks_t(gradient, FLOAT8[fmt])


@qk_rope_block_backward.fake
def _(dq, dk, dv, cos, sin, fmt, num_q):
    shape = (dq.shape[0], buffer_columns(dq, dk, dv))
    return *empty_rows(dq, shape, FLOAT8[fmt].dtype), *empty_rows_t(dq, shape, FLOAT8[fmt].dtype)


@triton.jit
def _rotated_back(
    dy_ptr, cos_ptr, sin_ptr, t, position, c, angle, real, rows, stride_dy, D: tl.constexpr, ROTATE: tl.constexpr
):  # fmt: skip
    """Rows t of some heads' gradient before the rotation: its halves (32, heads, E), and which are inside."""
    E: tl.constexpr = D // 2
    inside = (t < rows)[:, None, None] & real[None, :, :]
    source = dy_ptr + (t[:, None, None] * stride_dy + c[None, :, :])
    x1, x2 = load_halves(source, E, inside)
    if ROTATE:
        place = position[:, None, None] * D + angle
        cos1, cos2 = load_halves(cos_ptr + place, E, inside)
        sin1, sin2 = load_halves(sin_ptr + place, E, inside)
        x1, x2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    return x1, x2, inside


@triton.jit
def _store_halves(x1, x2, t, rows, out_ptr, scale_ptr, offsets, E, inside, INVERSE_MAX: tl.constexpr):
    """Rows t of a block given as the halves of its heads."""
    scale = scale_of(row_amax(larger(tl.abs(x1), tl.abs(x2))), INVERSE_MAX)
    store_scaled_rows(x1, scale, t, rows, out_ptr, scale_ptr, offsets, inside)
    store_scaled_rows(x2, scale, t, rows, out_ptr, scale_ptr, offsets + E, inside)


@triton.jit
def _rope_tile(
    dy_ptr, tile, block, first, stride_dy, ROTATE: tl.constexpr,
    cos_ptr, sin_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, T, P, positions, C,
    INVERSE_MAX: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program of `_rope_kernel`: a part's block of 128 columns; `first`: the part's first column of the buffer."""
    E: tl.constexpr = D // 2
    t0, c0 = block * 128, tile * 128
    t, i, rows = 4 * tl.arange(0, 32), tl.arange(0, E), T - t0
    e = i // V * V + i % V  # as in `strip_columns`
    c = (tl.arange(0, 128 // D) * D)[:, None] + e[None, :]  # (heads of a block, E): the heads' first halves
    real, angle, place = c < 128, e[None, None, :], t0 + t
    dy_ptr += t0.to(tl.int64) * stride_dy + c0
    rest = (c, angle, real, rows, stride_dy)
    a1, a2, in0 = _rotated_back(dy_ptr, cos_ptr, sin_ptr, t, place % positions, *rest, D, ROTATE)
    b1, b2, in1 = _rotated_back(dy_ptr, cos_ptr, sin_ptr, t + 1, (place + 1) % positions, *rest, D, ROTATE)
    c1, c2, in2 = _rotated_back(dy_ptr, cos_ptr, sin_ptr, t + 2, (place + 2) % positions, *rest, D, ROTATE)
    d1, d2, in3 = _rotated_back(dy_ptr, cos_ptr, sin_ptr, t + 3, (place + 3) % positions, *rest, D, ROTATE)
    c0 += first
    out_ptr += t0.to(tl.int64) * C + c0
    scale_ptr += tl.cast(c0 // 128, tl.int64) * T + t0
    target = t[:, None, None] * C + c[None, :, :]
    _store_halves(a1, a2, t, rows, out_ptr, scale_ptr, target, E, in0, INVERSE_MAX)
    _store_halves(b1, b2, t + 1, rows, out_ptr + C, scale_ptr, target, E, in1, INVERSE_MAX)
    _store_halves(c1, c2, t + 2, rows, out_ptr + 2 * C, scale_ptr, target, E, in2, INVERSE_MAX)
    _store_halves(d1, d2, t + 3, rows, out_ptr + 3 * C, scale_ptr, target, E, in3, INVERSE_MAX)
    x1, x2, inside = (a1, b1, c1, d1), (a2, b2, c2, d2), (in0, in1, in2, in3)
    amax1, amax2 = two_amax(quad_magnitude(*x1), quad_magnitude(*x2), 0)
    scale_t_ptr += block.to(tl.int64) * C + c0
    inverse1 = store_scales(amax1, scale_t_ptr, c, real, INVERSE_MAX)
    inverse2 = store_scales(amax2, scale_t_ptr + E, c, real, INVERSE_MAX)
    quad, quads, stride_t = tl.arange(0, 32), (P - t0) // 4, P // 4
    out_t_ptr += tl.cast(c0, tl.int64) * stride_t + t0 // 4
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    store_quads(x1, inside, inverse1, out_t_ptr, c, quad, real, quads, stride_t, PADDED, TYPE)
    store_quads(x2, inside, inverse2, out_t_ptr + E * stride_t, c, quad, real, quads, stride_t, PADDED, TYPE)


@kernel
def _rope_kernel(
    dq_ptr,  # (T, num_q * D), row stride `stride_q`: gradient of the rotated q
    dk_ptr,  # (T, num_kv * D), row stride `stride_k`: of the rotated k
    dv_ptr,  # (T, num_kv * D), row stride `stride_v`: of v
    cos_ptr,  # (positions, D)
    sin_ptr,  # (positions, D)
    out_ptr,  # (T, C) FP8: the fused buffer
    scale_ptr,  # (C / 128, T) FP32
    out_t_ptr,  # (C, P / 4) int32, four FP8 each
    scale_t_ptr,  # (ceil(T / 128), C) FP32
    T,
    P,
    positions,
    C,
    blocks_q,  # num_q * D / 128
    blocks_kv,
    stride_q,
    stride_k,
    stride_v,
    INVERSE_MAX: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    PADDED: tl.constexpr,
):
    shared = (cos_ptr, sin_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, T, P, positions, C)
    tile, block = tl.program_id(0), tl.program_id(1)
    first_v = blocks_q + blocks_kv
    if tile < blocks_q:
        _rope_tile(dq_ptr, tile, block, 0, stride_q, True, *shared, INVERSE_MAX, D, V, PADDED)
    elif tile < first_v:
        _rope_tile(dk_ptr, tile - blocks_q, block, blocks_q * 128, stride_k, True, *shared, INVERSE_MAX, D, V, PADDED)
    else:
        _rope_tile(dv_ptr, tile - first_v, block, first_v * 128, stride_v, False, *shared, INVERSE_MAX, D, V, PADDED)


@qk_rope_block_backward.cuda
def _(dq, dk, dv, cos, sin, fmt, num_q):
    # A block holds whole heads, and does not span two of q, k and v, which are separate tensors.
    if BLOCK % (dq.shape[1] // num_q) or dq.shape[1] % BLOCK or dk.shape[1] % BLOCK:
        return qk_rope_block_backward.reference(dq, dk, dv, cos, sin, fmt, num_q)
    parts = [dense_rows(part) for part in (dq, dk, dv)]
    tokens, columns = dq.shape[0], buffer_columns(dq, dk, dv)
    out, scale = empty_rows(dq, (tokens, columns), FLOAT8[fmt].dtype)
    out_t, scale_t = empty_rows_t(dq, (tokens, columns), FLOAT8[fmt].dtype)
    padded = out_t.shape[1]
    _rope_kernel[(columns // BLOCK, token_blocks(padded))](
        *parts, cos.contiguous(), sin.contiguous(), out, scale, out_t.view(torch.int32), scale_t,
        tokens, padded, cos.shape[0], columns, dq.shape[1] // BLOCK, dk.shape[1] // BLOCK,
        *[part.stride(0) for part in parts], inverse_max(fmt), dq.shape[1] // num_q, ROPE_VECTOR, padded > tokens,
        num_warps=ROPE_WARPS, maxnreg=ROPE_REGISTERS, **EXACT,
    )  # fmt: skip
    return out, scale, out_t, scale_t
