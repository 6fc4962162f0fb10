"""Block-scaled operands straight from the op that makes them: norm, SwiGLU, and the backward of SwiGLU and RoPE.

With one scale per tensor these ops take two passes, the first for the tensor's maximum. A block's maximum is at hand
where its values are, so here one pass does: the norm's statistics, output and kept codes; SwiGLU's kept codes and
product; the gradients of gate, up, q, k and v in both layouts, which never exist in 16 bits.

Kept codes are those of norm.py and swiglu.py. Legend and layouts of operands: blockwise.py; I intermediate width,
n = ceil(C / G) groups, D head width.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from overcoat.catalogue import op
from overcoat.formats import E4M3, FLOAT8, encode_groups, group_code
from overcoat.kernels import gpu
from overcoat.kernels.blockwise import BLOCK, empty_rows, empty_rows_t, row_blocks, row_blocks_t
from overcoat.kernels.norm import affine, layernorm_stats, normalize, rmsnorm_stats, sum_like
from overcoat.kernels.rope import rope_gradient
from overcoat.kernels.swiglu import gated_gradient, gated_product

# ---- norm -----------------------------------------------------------------------------------------------------------


def norm_from_statistics(
    x: Tensor,
    mean: Optional[Tensor],
    rstd: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm's output in 1x128 blocks and the kept codes of xhat, given mean (T,) or None and rstd (T,)."""
    xhat = normalize(x, mean, rstd)
    return *row_blocks(affine(xhat, weight, bias), E4M3), *encode_groups(xhat, code, group_size)


@op
def norm_block_quantize(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    centered: bool,
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """RMSNorm, or LayerNorm if `centered`, as GEMM operand and kept codes, in one pass over x.

    Args:
        x: (T, H); weight, bias: (H,) or None.

    Returns:
        y in E4M3 (T, H) and its scale (ceil(H / 128), T); codes of xhat (T, H) and their BF16 group maxima (T, n);
        rstd (T,) FP32.
    """
    x = x.contiguous()
    if centered:
        mean, rstd, _ = layernorm_stats.reference(x, weight, bias, eps)
    else:
        mean, (rstd, _) = None, rmsnorm_stats.reference(x, weight, eps)
    return *norm_from_statistics(x, mean, rstd, weight, bias, code, group_size), rstd


@norm_block_quantize.fake
def _(x, weight, bias, eps, centered, code, group_size):
    groups = (x.shape[1] + group_size - 1) // group_size
    return (
        *empty_rows(x, x.shape, E4M3.dtype),
        x.new_empty(x.shape, dtype=group_code(code).dtype),
        x.new_empty((x.shape[0], groups), dtype=torch.bfloat16),
        x.new_empty(x.shape[:1], dtype=torch.float32),
    )


@norm_block_quantize.cuda
def _(x, weight, bias, eps, centered, code, group_size):
    if BLOCK % group_size:
        return norm_block_quantize.reference(x, weight, bias, eps, centered, code, group_size)
    return gpu.blockwise_fused.norm_block_quantize(x, weight, bias, eps, centered, code, group_size)


@op
def add_norm_block_quantize(
    y: Tensor,
    residual: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    centered: bool,
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x = residual + y (T, H), and `norm_block_quantize` of x, still in one pass."""
    x = (residual + y).contiguous()
    return x, *norm_block_quantize.reference(x, weight, bias, eps, centered, code, group_size)


@add_norm_block_quantize.fake
def _(y, residual, weight, bias, eps, centered, code, group_size):
    groups = (y.shape[1] + group_size - 1) // group_size
    return (
        sum_like(y, residual),
        *empty_rows(y, y.shape, E4M3.dtype),
        y.new_empty(y.shape, dtype=group_code(code).dtype),
        y.new_empty((y.shape[0], groups), dtype=torch.bfloat16),
        y.new_empty(y.shape[:1], dtype=torch.float32),
    )


@add_norm_block_quantize.cuda
def _(y, residual, weight, bias, eps, centered, code, group_size):
    if BLOCK % group_size or y.dtype != residual.dtype:
        return add_norm_block_quantize.reference(y, residual, weight, bias, eps, centered, code, group_size)
    return gpu.blockwise_fused.add_norm_block_quantize(y, residual, weight, bias, eps, centered, code, group_size)


# ---- SwiGLU ---------------------------------------------------------------------------------------------------------


@op
def swiglu_block_quantize(gate_up: Tensor, code: str, group_size: int) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """h = silu(gate) * up as GEMM operand, and gate and up as kept codes, in one pass over gate_up (T, 2I).

    Returns:
        h in E4M3 (T, I) and its scale (ceil(I / 128), T); codes (T, 2I) and their BF16 group maxima (T, 2, n).
    """
    codes, group_amax = encode_groups(gate_up.unflatten(-1, (2, -1)), code, group_size)
    h = gated_product(gate_up.contiguous())
    return *row_blocks(h, E4M3), codes.flatten(1), group_amax.view(gate_up.shape[0], 2, -1)


@swiglu_block_quantize.fake
def _(gate_up, code, group_size):
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    return (
        *empty_rows(gate_up, (tokens, width), E4M3.dtype),
        gate_up.new_empty(gate_up.shape, dtype=group_code(code).dtype),
        gate_up.new_empty((tokens, 2, (width + group_size - 1) // group_size), dtype=torch.bfloat16),
    )


@swiglu_block_quantize.cuda
def _(gate_up, code, group_size):
    if BLOCK % group_size:
        return swiglu_block_quantize.reference(gate_up, code, group_size)
    return gpu.blockwise_fused.swiglu_block_quantize(gate_up, code, group_size)


@op
def swiglu_block_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, code: str, group_size: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """Backward of SwiGLU from the kept codes, for layers whose gate and up have biases.

    Args:
        dh: (T, I), gradient of h; codes, group_amax: from `swiglu_block_quantize`.

    Returns:
        gradient of gate_up (T, 2I) of dh's dtype; h rebuilt as transposed E4M3 operand (I, P) and its scale
        (ceil(T / 128), I).
    """
    gradient, product = gated_gradient(dh, codes, group_amax, code, group_size)
    return gradient.to(dh.dtype), *row_blocks_t(product, E4M3)


@swiglu_block_backward.fake
def _(dh, codes, group_amax, code, group_size):
    return dh.new_empty(codes.shape), *empty_rows_t(dh, dh.shape, E4M3.dtype)


@swiglu_block_backward.cuda
def _(dh, codes, group_amax, code, group_size):
    if BLOCK % group_size:
        return swiglu_block_backward.reference(dh, codes, group_amax, code, group_size)
    return gpu.blockwise_backward.swiglu_block_backward(dh, codes, group_amax, code, group_size)


@op
def swiglu_block_backward_quantize(
    dh: Tensor, codes: Tensor, group_amax: Tensor, fmt: str, code: str, group_size: int
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`swiglu_block_backward` with the gradient of gate_up straight in FP8, in both layouts.

    Returns:
        gradient (T, 2I) and its scale (ceil(2I / 128), T); gradient transposed (2I, P) and its scale
        (ceil(T / 128), 2I); h transposed (I, P) and its scale (ceil(T / 128), I).
    """
    gradient, product = gated_gradient(dh, codes, group_amax, code, group_size)
    fmt8 = FLOAT8[fmt]
    return *row_blocks(gradient, fmt8), *row_blocks_t(gradient, fmt8), *row_blocks_t(product, E4M3)


@swiglu_block_backward_quantize.fake
def _(dh, codes, group_amax, fmt, code, group_size):
    dtype = FLOAT8[fmt].dtype
    gradient = *empty_rows(dh, codes.shape, dtype), *empty_rows_t(dh, codes.shape, dtype)
    return *gradient, *empty_rows_t(dh, dh.shape, E4M3.dtype)


@swiglu_block_backward_quantize.cuda
def _(dh, codes, group_amax, fmt, code, group_size):
    # Where I is no multiple of 128 a block spans gate and up.
    if BLOCK % group_size or dh.shape[1] % BLOCK:
        return swiglu_block_backward_quantize.reference(dh, codes, group_amax, fmt, code, group_size)
    return gpu.blockwise_backward.swiglu_block_backward_quantize(dh, codes, group_amax, fmt, code, group_size)


# ---- rotary embedding -----------------------------------------------------------------------------------------------


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
    shape = (dq.shape[0], dq.shape[1] + dk.shape[1] + dv.shape[1])
    return *empty_rows(dq, shape, FLOAT8[fmt].dtype), *empty_rows_t(dq, shape, FLOAT8[fmt].dtype)


@qk_rope_block_backward.cuda
def _(dq, dk, dv, cos, sin, fmt, num_q):
    # A block holds whole heads, and does not span two of q, k and v, which are separate tensors.
    if BLOCK % (dq.shape[1] // num_q) or dq.shape[1] % BLOCK or dk.shape[1] % BLOCK:
        return qk_rope_block_backward.reference(dq, dk, dv, cos, sin, fmt, num_q)
    return gpu.blockwise_backward.qk_rope_block_backward(dq, dk, dv, cos, sin, fmt, num_q)
