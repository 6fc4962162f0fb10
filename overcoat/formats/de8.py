"""DE8: the 8-bit dynamic tree code of arXiv 2110.02861, a float with a decimal exponent of variable length.

A value in [-1, 1] is a sign, E leading zeros for the decade 10^-E (E = 0..6), a one, and the remaining bits: a linear
fraction of [0.1, 1] within the decade, decoded to the middle of its bin. So values near 1 have 6 fraction bits and
values near 1e-6 none. The unsigned tree, for v >= 0, uses the sign bit as one more fraction bit.

    signed      127 magnitudes, 0, and +1         byte = sign * 128 + rank; the "-0" byte 0x80 is +1
    unsigned    254 magnitudes, 0, and 1          byte = rank

Byte 0 is the value 0 in both, so a state of zeros is a tensor of zeros. Encoding takes the nearest value, the larger in
a tie. Both trees are small tables: decoding is indexing, encoding is a search among the midpoints.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def _magnitudes(fraction_bits: int) -> Tensor:
    """Return positive values below 1, ascending, FP64: 2^(fraction_bits - E) bin middles in the decade of 10^-E."""
    decades = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (fraction_bits - exponent) + 1, dtype=torch.float64)
        decades.append((edges[1:] + edges[:-1]) / 2 * 10.0**-exponent)
    return torch.cat(decades).sort().values


@cache
def decode_table(signed: bool, device: torch.device | str = "cpu") -> Tensor:
    """Return the value of each byte, (256,) FP32."""
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    if signed:
        positive = _magnitudes(6)  # 127 of them
        table = torch.cat([zero, positive, one, -positive])
    else:
        table = torch.cat([zero, _magnitudes(7), one])
    return table.float().to(device)


@cache
def encode_tables(signed: bool, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return midpoints (255,) FP32 between ascending values, and the byte (256,) uint8 of each ascending value."""
    values, order = decode_table(signed).sort()
    return ((values[1:] + values[:-1]) / 2).to(device), order.to(torch.uint8).to(device)


def smallest_magnitude(signed: bool) -> float:
    """Return the smallest positive value: 5.5e-7 signed, 3.25e-7 unsigned."""
    return float(_magnitudes(6 if signed else 7)[0])


def encode(y: Tensor, signed: bool) -> Tensor:
    """Return the bytes (uint8) of the values nearest to y in [-1, 1] ([0, 1] if unsigned); y beyond is clamped."""
    midpoints, byte = encode_tables(signed, y.device)
    return byte[torch.searchsorted(midpoints, y.contiguous(), right=True)]


def decode(codes: Tensor, signed: bool) -> Tensor:
    """Return the FP32 values of bytes."""
    return decode_table(signed, codes.device)[codes.int()]
