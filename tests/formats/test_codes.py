"""DE8, the 8-bit dynamic tree: its values by hand, the nearest of them, ties, ends, shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overcoat.formats import de8, log8
from overcoat.formats.expansion import (
    FORMAT_RANGE_LOG2,
    contract,
    expand,
    exponent_of_range,
    smallest_positive,
)
from overcoat.formats.moments import MOMENT_CODES, decode_second, encode_second


@pytest.mark.parametrize("signed", [True, False])
def test_de8_is_the_dynamic_tree(signed):
    table = de8.decode_table(signed)
    assert len(table.unique()) == 256
    assert table[0] == 0
    assert table.max() == 1
    assert torch.equal(de8.decode(de8.encode(table, signed), signed), table)
    y = torch.linspace(-1 if signed else 0, 1, 4001)
    nearest = (y[:, None] - table[None]).abs().amin(1)
    torch.testing.assert_close((de8.decode(de8.encode(y, signed), signed) - y).abs(), nearest, rtol=0, atol=1e-7)
    per_decade = ((table > 0.1) & (table < 1)).sum()
    assert per_decade == (64 if signed else 128)


# Middles of the bins that cut [0.1, 1] of a decade into 2^n.
BY_HAND = {
    True: {
        0: 0.0, 1: 0.55e-6, 2: 0.325e-5, 3: 0.775e-5, 4: 0.2125e-4, 64: 0.1 + 0.9 * 0.5 / 64,
        127: 0.1 + 0.9 * 63.5 / 64, 128: 1.0, 129: -0.55e-6, 255: -(0.1 + 0.9 * 63.5 / 64),
    },
    False: {
        0: 0.0, 1: 0.325e-6, 2: 0.775e-6, 3: 0.2125e-5, 127: 0.1 + 0.9 * 0.5 / 128, 254: 0.1 + 0.9 * 127.5 / 128,
        255: 1.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("signed", [True, False])
def test_bytes_by_hand(signed):
    codes = torch.tensor(list(BY_HAND[signed]), dtype=torch.uint8)
    values = torch.tensor(list(BY_HAND[signed].values()), dtype=torch.float64).float()
    torch.testing.assert_close(de8.decode(codes, signed), values, rtol=1e-6, atol=0)
    assert de8.encode(values, signed).tolist() == codes.tolist()


@pytest.mark.parametrize("signed", [True, False])
def test_ties_go_to_the_larger_value(signed):
    """Also of negative values: half way to zero is zero."""
    values = de8.decode_table(signed).sort().values
    middle = (values[1:] + values[:-1]) / 2
    assert torch.equal(de8.decode(de8.encode(middle, signed), signed), values[1:])
    below = torch.nextafter(middle, torch.tensor(-math.inf))
    assert torch.equal(de8.decode(de8.encode(below, signed), signed), values[:-1])


def test_signed_bytes_are_rank_and_sign():
    """The byte that would be -0 is +1; every other with the highest bit is the negative of the one without."""
    table = de8.decode_table(True)
    assert table[128] == 1
    assert torch.equal(table[129:], -table[1:128])
    assert (table[:129].diff() > 0).all()
    assert (de8.decode_table(False).diff() > 0).all()


# ---- Dynamic range expansion: every case of NUMERICS.md section 2 that the original breaks --------------------------


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


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
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


# ---- log8: codes of v with equal steps in the bits of FP32, by hand and over all bytes; what must stay zero ---------


ONE = 0x3F800000  # the bits of 1.0
LARGEST = 0x7F7FFF00  # of the largest maximum that is stored


def second(x: torch.Tensor, name: str) -> torch.Tensor:
    code = MOMENT_CODES[name]
    return decode_second(encode_second(x, code), code)


def group_of(values: list[int]) -> torch.Tensor:
    """One group of the FP32 numbers with these bits."""
    return torch.tensor(values, dtype=torch.int32).view(torch.float32).view(1, 1, -1)


def statistics(maximum: int, smallest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """M as bits and mu, as `encode` takes them."""
    return torch.tensor(maximum, dtype=torch.int32).view(1, 1, 1), group_of([smallest])


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=128))
def test_log8_is_within_half_a_step(values):
    """Half a step is 1/508 of the group's range of bits, the step rounded up to 4 bits of mantissa."""
    v = torch.tensor(values, dtype=torch.float32)
    v = v[v >= 2.0**-126].view(1, 1, -1)
    if not v.numel():
        return
    decoded = second(v, "log8")
    assert (decoded > 0).all()
    bits, out = v.view(torch.int32), decoded.view(torch.int32)
    span = int(bits.max() - bits.min()) + 128  # 128: M's own rounding
    assert (bits - out).abs().max() <= max(272, span / 508 * (1 + 1 / 16) + 16) + 1


def test_a_group_by_hand():
    """254 steps of 544 between M and mu: what lies on a step is kept exactly, what lies between goes to the nearest."""
    lowest = ONE - 254 * 544
    values = [ONE, ONE - 271, ONE - 273, ONE - 544, ONE - 100 * 544, lowest, 0]
    bits, smallest = statistics(ONE, lowest)
    codes, shape = log8.encode(group_of(values), bits, smallest)
    assert (codes.dtype, shape.dtype) == (torch.uint8, torch.int32)
    assert codes.flatten().tolist() == [255, 255, 254, 254, 155, 1, 0]
    assert shape.tolist() == [[[1]]]
    decoded = log8.decode(codes, bits, shape).view(torch.int32)
    assert decoded.flatten().tolist() == [ONE, ONE, ONE - 544, ONE - 544, ONE - 100 * 544, lowest, 0]


def test_the_step_is_the_smallest_byte_that_reaches_the_smallest_value():
    """So it is at most 1/16 above 1/254 of the range."""
    spans = torch.cat([torch.arange(130_000, 150_000, 7), torch.logspace(5.2, 9.2, 5000).int()]).to(torch.int32)
    spans = spans.view(-1, 1, 1)
    bits = torch.full_like(spans, LARGEST)
    smallest = (bits - spans).view(torch.float32)
    _, shape = log8.encode(smallest, bits, smallest)
    step = log8.step_bits(bits, shape)
    assert (254 * step >= spans).all()
    below = log8.step_bits(bits, shape - 1)
    assert (254 * below < spans)[shape > 1].all()
    assert (shape == 1).any()
    assert (shape > 1).any()


@pytest.mark.parametrize("maximum", [log8.FLOOR, 1 << 23, ONE, LARGEST])
def test_every_code_comes_back_for_every_step(maximum):
    """All 256 codes under all 255 bytes: the group of the values that they stand for has the same step and codes."""
    shape = torch.arange(1, 256, dtype=torch.int32).view(255, 1, 1)
    bits = torch.full_like(shape, maximum)
    codes = torch.arange(256).to(torch.uint8).expand(255, 1, 256).contiguous()
    values = log8.decode(codes, bits, shape)
    assert (values[..., 1:] > 0).all()
    assert (values.diff() > 0).all()
    assert (values[..., 0] == 0).all()
    assert (values[..., 255].view(torch.int32) == maximum).all()
    again, found = log8.encode(values, bits, values[..., 1:2].contiguous())
    assert torch.equal(again, codes)
    assert torch.equal(log8.step_bits(bits, found), log8.step_bits(bits, shape))


def test_a_group_that_counts_as_zero_is_all_zero():
    """M = 0 is stored for maxima below 2^-131; the values may be anything below."""
    values = [0, 1, 1000, log8.FLOOR - 1]
    bits, smallest = statistics(0, 1)
    codes, shape = log8.encode(group_of(values), bits, smallest)
    assert codes.flatten().tolist() == [0, 0, 0, 0]
    assert shape == 1  # a byte like any other
    assert (log8.decode(codes, bits, shape) == 0).all()
    anything = torch.tensor([0, 1, 254, 255], dtype=torch.uint8).view(1, 1, 4)
    assert (log8.decode(anything, bits, shape) == 0).all()


def test_the_floor_leaves_room_for_the_smallest_step():
    assert torch.tensor(log8.FLOOR, dtype=torch.int32).view(torch.float32) == 2.0**-131
    assert log8.FLOOR // 255 >= 544


def test_a_group_without_positive_values_beside_others_and_no_groups_at_all():
    """mu is inf where a group has no positive value: its range is not negative."""
    groups = torch.zeros(2, 1, 3)
    groups[1] = torch.tensor([1.0, 0.5, 0.0])
    bits = torch.tensor([0, ONE], dtype=torch.int32).view(2, 1, 1)
    smallest = torch.tensor([torch.inf, 0.5]).view(2, 1, 1)
    codes, shape = log8.encode(groups, bits, smallest)
    assert codes[0].count_nonzero() == 0
    # One octave, 2^23 bits, in 254 steps of at least 33026: 17 * 2^11 = 34816, 241 of them and nearly half another.
    assert shape.flatten().tolist() == [1, 0x61]
    assert codes[1].flatten().tolist() == [255, 255 - round(2**23 / 34816), 0]
    empty, none = log8.encode(groups[:0], bits[:0], smallest[:0])
    assert empty.shape == (0, 1, 3)
    assert log8.decode(empty, bits[:0], none).shape == (0, 1, 3)
