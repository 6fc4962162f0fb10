"""Dynamic range expansion: every case of NUMERICS.md section 2 that the original breaks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overcoat.formats.expansion import (
    FORMAT_RANGE_LOG2,
    contract,
    expand,
    exponent_of_range,
    normalize,
    smallest_positive,
)

E4M3_RANGE = FORMAT_RANGE_LOG2["e4m3"]


def group(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1)


def exponent(x: torch.Tensor, range_log2: float = E4M3_RANGE) -> int:
    return int(exponent_of_range(x.abs().amax(-1, keepdim=True), smallest_positive(x), range_log2))


@pytest.mark.parametrize("octaves", [1.0, 3.0, 8.5, 40.0])
def test_exponent_matches_the_formula_rounded_down(octaves):
    x = group(1.0, 2.0**-octaves, -(2.0 ** (-octaves / 2)))
    expected = min(255, math.floor(16 * E4M3_RANGE / octaves))
    assert exponent(x) == expected


def test_all_zero_group_has_exponent_one_and_stays_zero():
    x = group(0.0, 0.0, -0.0)
    assert exponent(x) == 16
    k16 = torch.full((1, 1, 1), 16, dtype=torch.uint8)
    z = expand(x, x.abs().amax(-1, keepdim=True), k16)
    assert torch.equal(contract(z, k16).abs(), torch.zeros(1, 1, 3))


def test_a_denormal_maximum_counts_as_zero():
    x = group(1e-42, -1e-43)
    z = expand(x, x.abs().amax(-1, keepdim=True), torch.full((1, 1, 1), 255, dtype=torch.uint8))
    assert z.abs().max() < 1e-30


@pytest.mark.parametrize("values", [(3.0,), (-3.0, 3.0, 3.0), (1e-37,), (0.7, 0.0)])
def test_constant_group_has_the_largest_exponent_and_takes_the_largest_code(values):
    x = group(*values)
    amax = x.abs().amax(-1, keepdim=True)
    k16 = exponent_of_range(amax, smallest_positive(x), E4M3_RANGE)
    assert int(k16) == 255
    z = expand(x, amax, k16) * 448.0
    assert torch.equal(torch.round(z).abs(), torch.where(x != 0, 448.0, 0.0))  # so it decodes to amax exactly


def test_zeros_never_enter_the_smallest_value():
    assert smallest_positive(group(0.0, -4.0, 0.5, 0.0)).item() == 0.5
    assert smallest_positive(group(0.0, 0.0)).item() == math.inf


@pytest.mark.parametrize("amax", [1e-45, 1e-40, 2.0**-126, 2.0**-62, 1.0, 3e38])
def test_normalize_reaches_one_for_every_positive_maximum(amax):
    m = torch.tensor([[[amax]]])
    y = normalize(torch.cat([m, -m, m / 2, 0 * m], -1), m)
    torch.testing.assert_close(y[..., :2], group(1.0, -1.0), rtol=2e-7, atol=0)
    assert y.isfinite().all()
    assert y[..., 3] == 0


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_expansion_fits_the_format_and_inverts(values):
    """|y|^k stays inside the format's range (k is rounded down, never up), and contract undoes expand."""
    x = group(*values)
    amax, smallest = x.abs().amax(-1, keepdim=True), smallest_positive(x)
    k16 = exponent_of_range(amax, smallest, E4M3_RANGE)
    z = expand(x, amax, k16)
    assert z.isfinite().all()
    assert (z.abs() <= 1.0).all()
    assert torch.equal(torch.sign(z), torch.sign(x)) or k16.item() == 1
    if 1 < k16.item() < 255 and (x != 0).any():
        assert z[z != 0].abs().min() >= 2.0**-E4M3_RANGE * 0.999
        back = contract(z, k16) * amax
        torch.testing.assert_close(back, x, rtol=1e-3, atol=0)  # 16/k times FP32's error
