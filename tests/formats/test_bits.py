"""Flags in bits: which bit is whose, and back."""

from __future__ import annotations

import torch

from overcoat.formats.bits import from_bits, to_bits


def test_the_first_flag_is_the_lowest_bit_and_all_come_back():
    flags = torch.zeros(2, 16, dtype=torch.bool)
    flags[0, 0] = flags[0, 9] = flags[1, 7] = True
    assert to_bits(flags).tolist() == [[1, 2], [128, 0]]
    flags = torch.rand(33, 48, generator=torch.Generator().manual_seed(0)) < 0.3
    assert torch.equal(from_bits(to_bits(flags)), flags)
