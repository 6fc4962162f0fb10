"""Flags of a matrix, eight in a byte: which elements an op has cut off, whose gradient is zero."""

from __future__ import annotations

import torch
from torch import Tensor


def to_bits(flags: Tensor) -> Tensor:
    """Pack bool (T, N), N a multiple of 8, into uint8 (T, N / 8), the first in the lowest bit."""
    places = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (flags.unflatten(1, (-1, 8)).to(torch.uint8) << places).sum(2, dtype=torch.uint8)


def from_bits(bits: Tensor) -> Tensor:
    """Unpack what `to_bits` packed: bool (T, N)."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(2) >> places) & 1).bool().flatten(1)
