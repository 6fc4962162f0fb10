"""Inputs that the tests of the rotary embedding's kernels have in common."""

from __future__ import annotations

import torch

from tests.kernels.gpu.compare import DEVICE, INTERPRETED

# Tokens, positions, query heads, key/value heads, head width.
# 16 heads of 80: a token a tile, halves of heads that are no power of 2.
CASES = [(1, 1, 1, 1, 16), (14, 7, 2, 2, 80), (35, 35, 4, 2, 128), (3, 3, 16, 16, 80), (40, 20, 3, 1, 64)]
CASES += [] if INTERPRETED else [(61, 61, 4, 2, 128), (2000, 1000, 32, 32, 128), (1000, 1000, 28, 4, 128)]


def tables(positions: int, width: int, dtype: torch.dtype = torch.bfloat16):
    """cos and sin; the halves differ, as the op's contract allows."""
    angle = torch.randn(positions, width, device=DEVICE) * 3
    return (1.3 * angle.cos()).to(dtype), (1.3 * angle.sin()).to(dtype)


def split_heads(x, num_q, num_kv):
    """The columns of q, k and v: views, whose rows lie apart."""
    width = x.shape[1] // (num_q + 2 * num_kv)
    return x.split((num_q * width, num_kv * width, num_kv * width), 1)


def laid_out(parts):
    """The same gradients as views of one buffer, as columns of wider ones, apart, and stored column by column."""
    wider = [torch.cat((part, part.neg()), 1)[:, : part.shape[1]] for part in parts]
    return parts, wider, [part.contiguous() for part in parts], [part.t().contiguous().t() for part in parts]


def head_weights(width: int, wanted: bool):
    return tuple(torch.randn(width, device=DEVICE).bfloat16() if wanted else None for _ in range(2))
