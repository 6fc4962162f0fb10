"""Tensors that the formats' tests draw, and the spacing of FP8 grids.

Every error bound is the format's own: half the spacing of its grid where the value lies. On top comes SLACK for the
FP32 arithmetic around the rounding (a reciprocal and two products, each exact to 2^-24): a value that close to the
middle between two codes may take either.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from overcoat.formats import Float8

SLACK = 2.0**-21
MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}

# The largest BF16 number: a group's maximum is stored in BF16.
BF16_MAX = torch.finfo(torch.bfloat16).max
any_floats = st.floats(-BF16_MAX, BF16_MAX, width=32)


@st.composite
def tensors(draw: st.DrawFn, max_rows: int = 5, max_columns: int = 300) -> Tensor:
    """Matrices of all widths: arbitrary FP32 bit patterns (denormals too), or Gaussians spread over many octaves."""
    rows, columns = draw(st.integers(1, max_rows)), draw(st.integers(1, max_columns))
    if draw(st.booleans()):
        values = draw(st.lists(any_floats, min_size=1, max_size=24))
        return torch.tensor(values).repeat(rows * columns // len(values) + 1)[: rows * columns].view(rows, columns)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread, centre = draw(st.integers(0, 60)), draw(st.integers(-60, 60))
    octaves = torch.randint(centre - spread, centre + spread + 1, (rows, columns), generator=generator)
    return torch.ldexp(torch.randn(rows, columns, generator=generator), octaves)


def half_spacing(t: Tensor, fmt: Float8) -> Tensor:
    """Half the distance between neighbours of |t| in the format's own unit."""
    exponent = torch.floor(torch.log2(t.abs().clamp_min(1e-300))) - MANTISSA_BITS[fmt.name]
    return torch.exp2(exponent).clamp_min(fmt.tiny) / 2
