"""DE8, the 8-bit dynamic tree: its values by hand, the nearest of them, ties, ends, shapes."""

import math

import pytest
import torch

from overcoat.formats import de8


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


@pytest.mark.parametrize("signed", [True, False])
def test_values_below_half_of_the_smallest_are_zero(signed):
    smallest = de8.smallest_magnitude(signed)
    assert smallest == pytest.approx(5.5e-7 if signed else 3.25e-7, rel=1e-12)
    assert smallest == pytest.approx(float(de8.decode_table(signed)[1]), rel=1e-7)
    y = torch.tensor([0.0, -0.0, 1e-45, 0.49 * smallest, 0.51 * smallest, smallest])
    assert de8.encode(y, signed).tolist() == [0, 0, 0, 0, 1, 1]


def test_signed_bytes_are_rank_and_sign():
    """The byte that would be -0 is +1; every other with the highest bit is the negative of the one without."""
    table = de8.decode_table(True)
    assert table[128] == 1
    assert torch.equal(table[129:], -table[1:128])
    assert (table[:129].diff() > 0).all()
    assert (de8.decode_table(False).diff() > 0).all()
