"""The three products of a linear layer with block scales (`Recipe.linear_scaling="block"`), for linear.py and mlp.py.

    forward   y  = x W^T     x 1x128 along K               W 128x128
    dgrad     dx = dy W      dy 1x128 along N              W^T 128x128, quantized again where it is used
    wgrad     dW = dy^T x    dy^T and x^T 1x128 along T

Nothing of an operand is kept for the backward, not even its scale: the transposed layouts have scales of their own
(kernels/blockwise.py).
"""

from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch import Tensor

from overcoat.formats import Quantized
from overcoat.kernels.block_weights import block_stack_weights
from overcoat.kernels.blockwise import BLOCK
from overcoat.kernels.gemm import block_gemm


def forward_product(x: Quantized, weights: Sequence[Tensor], bias: Optional[Tensor], dtype: torch.dtype) -> Tensor:
    """y = x W^T + bias (T, N) of x (T, K) in 1x128 blocks and the stacked weights."""
    weight, scale = block_stack_weights(list(weights), False)
    return block_gemm(x.data, weight, x.scale, scale, True, bias, dtype)


def dgrad(dy: Quantized, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """dx = dy W (T, K) of dy (T, N) in 1x128 blocks and the stacked weights."""
    weight, scale = block_stack_weights(list(weights), True)
    return block_gemm(dy.data, weight, dy.scale, scale, True, None, dtype)


def wgrad(dy_t: Quantized, x_t: Quantized, dtype: torch.dtype) -> Tensor:
    """dW = dy^T x (N, K) of dy^T (N, P) and x^T (K, P), both in 1x128 blocks along the tokens."""
    return block_gemm(dy_t.data, x_t.data, dy_t.scale, x_t.scale, False, None, dtype)


def whole_blocks(*columns: int) -> bool:
    """Whether tensors of these widths, side by side, can be quantized one by one: no block spans two of them."""
    return all(width % BLOCK == 0 for width in columns)
