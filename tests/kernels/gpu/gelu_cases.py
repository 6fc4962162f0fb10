"""Inputs and parameters that the tests of GELU's kernels have in common."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.gpu.compare import FORMATS, INTERPRETED, awkward

SHAPES = [(1, 16), (7, 100), (130, 200), (144, 256)]  # of 144 tokens, a multiple of 16, nothing is padded
SHAPES += [] if INTERPRETED else [(1000, 12288), (300, 17920)]
GROUPS = [("sqrt8", 128), ("e4m3", 16), ("int8", 80)]
# The gradients' format, and whether they are summed for a bias: on a GPU kernels of their own each, interpreted one
# that takes long, in which neither has to do with the other.
OUTPUTS = list(zip(FORMATS, (True, False))) if INTERPRETED else list(itertools.product(FORMATS, (True, False)))
forms = pytest.mark.parametrize("approximate", ["none", "tanh"])
shapes = pytest.mark.parametrize("shape", SHAPES)


def gradient(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """With a column of ones, whose sum is that of the derivatives, and a row of zeros."""
    dh = awkward(*shape, dtype, seed=1).clamp(-50, 50)
    dh[:, 0] = 1.0
    return dh
