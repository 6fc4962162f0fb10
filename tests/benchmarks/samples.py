"""Moments as training makes them, for the tests of `benchmarks.state_*`."""

from __future__ import annotations

import torch
from torch import Tensor


def moments(num_groups: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(m, v), FP32 (1, N, 128): log-normal scales per group and element, |m| <= sqrt(v); the last group is zero."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(2 * torch.randn(1, num_groups, 1, generator=generator) - 9)
    root = torch.exp(0.7 * torch.randn(1, num_groups, 128, generator=generator)) * scale
    m = root * (0.25 * torch.randn(1, num_groups, 128, generator=generator)).clamp(-1, 1)
    v = root.square()
    m[:, -1], v[:, -1] = 0.0, 0.0
    return m, v
