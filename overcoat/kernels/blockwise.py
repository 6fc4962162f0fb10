"""FP8 operands with block scales: 1x128 activations and gradients, 128x128 weights (DeepSeek-V3, arXiv 2412.19437).

One scale per tensor lets a single outlier push everything else towards FP8's smallest values. Here 128 neighbours on
the contraction axis share a scale, so an outlier costs its own group; a weight's scale covers 128 rows as well, which
makes one quantized weight (and its transpose) serve forward and dgrad:

    forward   y  = x    (T, K) . W   (N, K)^T      x 1x128 along K      W   128x128
    dgrad     dx = dy   (T, N) . W^T (K, N)^T      dy 1x128 along N     W^T 128x128, the same scales transposed
    wgrad     dW = dy^T (N, T) . x^T (K, T)^T      both 1x128 along T

dgrad and wgrad contract over different axes, so the two layouts of a gradient are rounded with different scales.

No op waits for the maximum of a whole tensor: each reads its input once. A scale is FP32, amax / (format's maximum), 1
for a block of zeros, as in formats.py. Scales lie as the library's GEMM (gemm.py) reads them, L = ceil(K / 128) blocks
along the contraction axis, R rows of the operand:

    1x128     (L, R)
    128x128   (ceil(R / 128), L4), L4 = L rounded up to a multiple of 4, filled up with zeros

Legend: T tokens, C columns, P = T rounded up to a multiple of 16, G group size of kept codes.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overcoat.catalogue import op
from overcoat.formats import E4M3, FLOAT8, Float8, Quantized, decode_groups, quantize_blocks
from overcoat.kernels import gpu
from overcoat.kernels.quantize import padded_tokens

BLOCK = 128


def blocks(size: int) -> int:
    """How many blocks of 128 cover `size`."""
    return (size + BLOCK - 1) // BLOCK


def padded_blocks(size: int) -> int:
    """L4: `blocks`, rounded up to the multiple of 4 that the GEMM wants for 128x128 scales."""
    return (blocks(size) + 3) // 4 * 4


# ---- the reference, and shapes for the fakes --------------------------------------------------------------------


def row_blocks(x: Tensor, fmt: Float8) -> Tuple[Tensor, Tensor]:
    """x (T, C) in 1x128 blocks: data (T, C), scale (ceil(C / 128), T)."""
    data, scale = quantize_blocks(x, (1, BLOCK), fmt)
    return data, scale.t().contiguous()


def row_blocks_t(x: Tensor, fmt: Float8) -> Tuple[Tensor, Tensor]:
    """x^T in 1x128 blocks along the tokens: data (C, P), padded with zeros, scale (ceil(T / 128), C)."""
    data, scale = row_blocks(x.t(), fmt)
    missing = padded_tokens(x.shape[0]) - x.shape[0]
    return F.pad(data.view(torch.uint8), (0, missing)).view(data.dtype), scale


def empty_rows(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    """Uninitialised data (T, C) = shape and scale (ceil(C / 128), T) of a 1x128 operand, on x's device."""
    rows, columns = shape
    data = torch.empty((rows, columns), dtype=dtype, device=x.device)
    return data, torch.empty((blocks(columns), rows), dtype=torch.float32, device=x.device)


def empty_rows_t(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    """Uninitialised data (C, P) and scale (ceil(T / 128), C) of the transposed operand of a tensor (T, C) = shape."""
    tokens, columns = shape
    data = torch.empty((columns, padded_tokens(tokens)), dtype=dtype, device=x.device)
    return data, torch.empty((blocks(tokens), columns), dtype=torch.float32, device=x.device)


# ---- activations and gradients ------------------------------------------------------------------------------------


@op
def block_quantize(x: Tensor, fmt: str) -> Tuple[Tensor, Tensor]:
    """x (T, C) in 1x128 blocks: FP8 data (T, C), FP32 scale (ceil(C / 128), T)."""
    return row_blocks(x.contiguous(), FLOAT8[fmt])


@block_quantize.fake
def _(x, fmt):
    return empty_rows(x, x.shape, FLOAT8[fmt].dtype)


@block_quantize.cuda
def _(x, fmt):
    return gpu.blockwise.block_quantize(x, fmt)


@op
def block_quantize_both(x: Tensor, fmt: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (T, C) in both layouts from one read: `block_quantize`, then `block_quantize_t`."""
    x = x.contiguous()
    return *row_blocks(x, FLOAT8[fmt]), *row_blocks_t(x, FLOAT8[fmt])


@block_quantize_both.fake
def _(x, fmt):
    dtype = FLOAT8[fmt].dtype
    return *empty_rows(x, x.shape, dtype), *empty_rows_t(x, x.shape, dtype)


@block_quantize_both.cuda
def _(x, fmt):
    return gpu.blockwise.block_quantize_both(x, fmt)


@op
def block_quantize_t(x: Tensor, fmt: str) -> Tuple[Tensor, Tensor]:
    """x (T, C) transposed, in 1x128 blocks along the tokens: FP8 data (C, P), FP32 scale (ceil(T / 128), C)."""
    return row_blocks_t(x.contiguous(), FLOAT8[fmt])


@block_quantize_t.fake
def _(x, fmt):
    return empty_rows_t(x, x.shape, FLOAT8[fmt].dtype)


@block_quantize_t.cuda
def _(x, fmt):
    return gpu.blockwise.block_quantize_t(x, fmt)


@op
def block_requantize_t(
    codes: Tensor,
    group_amax: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    code: str,
    group_size: int,
) -> Tuple[Tensor, Tensor]:
    """Kept codes (T, C) -> decoded * weight + bias as E4M3 operand of wgrad: data (C, P), scale (ceil(T / 128), C).

    As `requantize_t`, with scales of its own: the forward's run along the other axis.
    """
    y = decode_groups(Quantized(codes, group_amax), code, group_size)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return row_blocks_t(y, E4M3)


@block_requantize_t.fake
def _(codes, group_amax, weight, bias, code, group_size):
    return empty_rows_t(codes, codes.shape, E4M3.dtype)


@block_requantize_t.cuda
def _(codes, group_amax, weight, bias, code, group_size):
    return gpu.blockwise.block_requantize_t(codes, group_amax, weight, bias, code, group_size)


# ---- weights ------------------------------------------------------------------------------------------------------


@op
def block_stack_weights(weights: List[Tensor], transposed: bool) -> Tuple[Tensor, Tensor]:
    """Weights (N_i, K) as one E4M3 operand in 128x128 blocks of the stacked matrix (N, K), N = sum N_i.

    A block may span two weights where a row count is no multiple of 128; the layouts of a weight hold the same numbers.

    Returns:
        data (N, K), scale (ceil(N / 128), L4 of K); if `transposed` data (K, N), scale (ceil(K / 128), L4 of N).
    """
    data, scale = quantize_blocks(torch.cat([w.float() for w in weights]), (BLOCK, BLOCK), E4M3)
    if transposed:
        data, scale = data.view(torch.uint8).t().contiguous().view(E4M3.dtype), scale.t()
    return data, F.pad(scale, (0, padded_blocks(data.shape[1]) - scale.shape[1])).contiguous()


@block_stack_weights.fake
def _(weights, transposed):
    rows, columns = sum(w.shape[0] for w in weights), weights[0].shape[1]
    rows, columns = (columns, rows) if transposed else (rows, columns)
    scale = weights[0].new_empty((blocks(rows), padded_blocks(columns)), dtype=torch.float32)
    return weights[0].new_empty((rows, columns), dtype=E4M3.dtype), scale


@block_stack_weights.cuda
def _(weights, transposed):
    return gpu.blockwise.block_stack_weights(weights, transposed)
