"""SwiGLU straight to block-scaled operands, forward and backward.

With one scale per tensor these ops take two passes, the first for the tensor's maximum. A block's maximum is at hand
where its values are, so here one pass does: kept codes and product; the gradients of gate and up in both layouts, which
never exist in 16 bits.

Kept codes are those of swiglu.py. Legend and layouts of operands: blockwise.py; I intermediate width.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor

from overcoat.catalogue import op
from overcoat.formats import E4M3, FLOAT8, encode_groups, group_code
from overcoat.kernels import gpu
from overcoat.kernels.blockwise import BLOCK, empty_rows, empty_rows_t, row_blocks, row_blocks_t
from overcoat.kernels.swiglu import gated_gradient, gated_product

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
