"""Inputs that the tests of SwiGLU's kernels have in common."""

from __future__ import annotations

import torch

from tests.kernels.gpu.compare import INTERPRETED, awkward

SHAPES = [(1, 16), (7, 100), (48, 256), (61, 688)]  # of 48 tokens, a multiple of 16, nothing is padded
SHAPES += [] if INTERPRETED else [(1000, 11008), (300, 17920)]
GROUPS = [("sqrt8", 128), ("e4m3", 16), ("int8", 80)]
# Of 6 groups each, 8 in a tile of the encoder's, 32 in one of the backward's: many programs at once on a GPU, 45 and 12
# one after another where they are interpreted.
MANY_ROWS = 60 if INTERPRETED else 300


def gates(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return awkward(shape[0], 2 * shape[1], dtype).clamp(-200, 200)


def just_below(largest: torch.Tensor) -> torch.Tensor:
    """Bits of a maximum that another program might have found: 32 steps of FP32 below the true one."""
    return largest.view(torch.int32) - 32
