"""GELU with block scales (`Recipe.linear_scaling="block"`): blockwise_fused.py's SwiGLU ops for gelu.py's function.

Kept codes are those of gelu.py, layouts of operands those of blockwise.py. No op waits for a tensor's maximum, so one
pass over u does what takes two with one scale per tensor. Gradients are summed for the bias before they are rounded.

Legend: T tokens, I intermediate width, P = T padded to a multiple of 16, n = ceil(I / G) groups.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from overcoat.catalogue import op
from overcoat.formats import E4M3, FLOAT8, encode_groups, group_code
from overcoat.kernels import gpu
from overcoat.kernels.blockwise import BLOCK, empty_rows, empty_rows_t, row_blocks, row_blocks_t
from overcoat.kernels.gelu import gelu, gelu_gradient, token_sums


@op
def gelu_block_quantize(
    u: Tensor, approximate: str, code: str, group_size: int
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """h = gelu(u) as GEMM operand, and u as kept codes, in one pass over u (T, I).

    Returns:
        h in E4M3 (T, I) and its scale (ceil(I / 128), T); codes (T, I) and their BF16 group maxima (T, n).
    """
    h, _ = gelu(u.contiguous().float(), approximate)
    codes, group_amax = encode_groups(u, code, group_size)
    return *row_blocks(h, E4M3), codes, group_amax


@gelu_block_quantize.fake
def _(u, approximate, code, group_size):
    return (
        *empty_rows(u, u.shape, E4M3.dtype),
        u.new_empty(u.shape, dtype=group_code(code).dtype),
        u.new_empty((u.shape[0], (u.shape[1] + group_size - 1) // group_size), dtype=torch.bfloat16),
    )


@gelu_block_quantize.cuda
def _(u, approximate, code, group_size):
    if BLOCK % group_size:
        return gelu_block_quantize.reference(u, approximate, code, group_size)
    return gpu.gelu_blockwise.gelu_block_quantize(u, approximate, code, group_size)


@op
def gelu_block_backward(
    dh: Tensor, codes: Tensor, group_amax: Tensor, approximate: str, code: str, group_size: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """Backward of GELU from the kept codes.

    Args:
        dh: (T, I), gradient of h; codes, group_amax: from `gelu_block_quantize`.

    Returns:
        du (T, I) of dh's dtype; h rebuilt as transposed E4M3 operand (I, P) and its scale (ceil(T / 128), I).
    """
    gradient, h = gelu_gradient(dh, codes, group_amax, approximate, code, group_size)
    return gradient.to(dh.dtype), *row_blocks_t(h, E4M3)


@gelu_block_backward.fake
def _(dh, codes, group_amax, approximate, code, group_size):
    return dh.new_empty(dh.shape), *empty_rows_t(dh, dh.shape, E4M3.dtype)


@gelu_block_backward.cuda
def _(dh, codes, group_amax, approximate, code, group_size):
    if BLOCK % group_size:
        return gelu_block_backward.reference(dh, codes, group_amax, approximate, code, group_size)
    return gpu.gelu_blockwise.gelu_block_backward(dh, codes, group_amax, approximate, code, group_size)


@op
def gelu_block_backward_quantize(
    dh: Tensor,
    codes: Tensor,
    group_amax: Tensor,
    fmt: str,
    has_bias: bool,
    approximate: str,
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`gelu_block_backward` with du straight in FP8, in both layouts.

    Returns:
        du (T, I) and its scale (ceil(I / 128), T); du transposed (I, P) and its scale (ceil(T / 128), I); h transposed
        (I, P) and its scale (ceil(T / 128), I); sum of du over the tokens (I,) FP32, empty without a bias.
    """
    gradient, h = gelu_gradient(dh, codes, group_amax, approximate, code, group_size)
    both = *row_blocks(gradient, FLOAT8[fmt]), *row_blocks_t(gradient, FLOAT8[fmt])
    return *both, *row_blocks_t(h, E4M3), token_sums(gradient, has_bias)


@gelu_block_backward_quantize.fake
def _(dh, codes, group_amax, fmt, has_bias, approximate, code, group_size):
    dtype = FLOAT8[fmt].dtype
    both = *empty_rows(dh, dh.shape, dtype), *empty_rows_t(dh, dh.shape, dtype)
    sums = dh.new_empty(dh.shape[1] if has_bias else 0, dtype=torch.float32)
    return *both, *empty_rows_t(dh, dh.shape, E4M3.dtype), sums


@gelu_block_backward_quantize.cuda
def _(dh, codes, group_amax, fmt, has_bias, approximate, code, group_size):
    if BLOCK % group_size:
        return gelu_block_backward_quantize.reference(
            dh, codes, group_amax, fmt, has_bias, approximate, code, group_size
        )
    return gpu.gelu_blockwise.gelu_block_backward_quantize(
        dh, codes, group_amax, fmt, has_bias, approximate, code, group_size
    )
