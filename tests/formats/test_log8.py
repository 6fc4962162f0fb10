"""log8: codes of v with equal steps in the bits of FP32, by hand and over all bytes; what must stay zero."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overcoat.formats import log8
from overcoat.formats.moments import MOMENT_CODES, decode_second, encode_second

ONE = 0x3F800000  # the bits of 1.0
LARGEST = 0x7F7FFF00  # of the largest maximum that is stored


def second(x: torch.Tensor, name: str) -> torch.Tensor:
    code = MOMENT_CODES[name]
    return decode_second(encode_second(x, code), code)


def group(values: list[int]) -> torch.Tensor:
    """One group of the FP32 numbers with these bits."""
    return torch.tensor(values, dtype=torch.int32).view(torch.float32).view(1, 1, -1)


def statistics(maximum: int, smallest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """M as bits and mu, as `encode` takes them."""
    return torch.tensor(maximum, dtype=torch.int32).view(1, 1, 1), group([smallest])


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=128))
@settings(max_examples=200, deadline=None)
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
    codes, shape = log8.encode(group(values), bits, smallest)
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


def test_over_the_whole_of_fp32_normal_numbers_are_not_zero_and_small_denormals_are():
    """Zero is 255 steps below M, and 2^-126 a step above it; half a step is 2^-127."""
    values = [LARGEST, 1 << 23, (1 << 22) + 256, (1 << 22) - 256, 1, 0]
    bits, smallest = statistics(LARGEST, 1)
    codes, shape = log8.encode(group(values), bits, smallest)
    assert codes.flatten().tolist() == [255, 1, 1, 0, 0, 0]
    decoded = log8.decode(codes, bits, shape)
    assert decoded.isfinite().all()
    assert decoded[0, 0, 0].view(torch.int32) == LARGEST


@pytest.mark.parametrize("above", [0, 128, 255])
def test_what_lies_above_a_maximum_that_was_rounded_down_has_its_code(above):
    """By up to 255 bits, less than half of the smallest step."""
    codes, shape = log8.encode(group([ONE + above, ONE - 544, 0]), *statistics(ONE, ONE - 544))
    assert codes.flatten().tolist() == [255, 254, 0]
    assert shape == 1


def test_a_group_that_counts_as_zero_is_all_zero():
    """M = 0 is stored for maxima below 2^-131; the values may be anything below."""
    values = [0, 1, 1000, log8.FLOOR - 1]
    bits, smallest = statistics(0, 1)
    codes, shape = log8.encode(group(values), bits, smallest)
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
