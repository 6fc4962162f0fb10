"""Inputs and parameters that the tests of the activation's kernels have in common."""

from __future__ import annotations

import itertools

import pytest
import torch

from overcoat.kernels.activation_functions import ACTIVATIONS
from tests.kernels.compare import FORMATS, INTERPRETED, awkward

# (tokens, intermediate width): padded tokens, more of them than a block; of 144, a multiple of 16, none are padded.
SHAPES = [(7, 100), (134, 200), (144, 128)]
SHAPES += [] if INTERPRETED else [(1, 16), (144, 256), (1000, 11008), (300, 17920)]
GROUPS = [("sqrt8", 128), ("e4m3", 16), ("int8", 80)]
BLOCK_GROUPS = [("sqrt8", 128), ("e4m3", 16), ("int8", 64)]
KINDS = [("silu", True), ("gelu", False), ("gelu_tanh", True), ("relu2", False)]


def combined(groups: list[tuple[str, int]]) -> list[tuple[str, bool, str, int]]:
    """Activation, gated, code, group size: interpreted each kind once, compiled all with all."""
    if INTERPRETED:
        return [(*kind, *groups[i % 3]) for i, kind in enumerate(KINDS)]
    return [(*kind, *group) for kind in itertools.product(ACTIVATIONS, (True, False)) for group in groups]


# The gradients' format, and whether they are summed for a bias.
OUTPUTS = list(zip(FORMATS, (True, False))) if INTERPRETED else list(itertools.product(FORMATS, (True, False)))

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
kinds = pytest.mark.parametrize(("activation", "gated"), KINDS)
cases = pytest.mark.parametrize(("activation", "gated", "code", "group_size"), combined(GROUPS))
block_cases = pytest.mark.parametrize(("activation", "gated", "code", "group_size"), combined(BLOCK_GROUPS))


def dtypes(shape: tuple[int, int]) -> list[torch.dtype]:
    """FP32 where it does not take long."""
    return [torch.bfloat16, torch.float32] if shape[0] < 10 or not INTERPRETED else [torch.bfloat16]


def inputs(shape: tuple[int, int], gated: bool, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """z of (T, I), or of (T, 2I) with a gate."""
    return awkward(shape[0], (1 + gated) * shape[1], dtype).clamp(-200, 200)


def gradient(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """dh, with a column of ones, whose sum is that of the derivatives, and a row of zeros."""
    dh = awkward(*shape, dtype, seed=1).clamp(-50, 50)
    dh[:, 0] = 1.0
    return dh
