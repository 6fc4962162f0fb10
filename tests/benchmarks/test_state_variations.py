"""Variations of "8bit": that each is the code its name says."""

import pytest
import torch

from benchmarks.state_codes import maximum_second, product_first, product_second
from benchmarks.state_variations import (
    better_of_two,
    fourth_root8,
    log8_any_step,
    log_grid,
    power8,
    ratio8,
    searched_log_grid,
    searched_power,
    softsign8,
    sqrt8_mean,
    sqrt8_offset,
    vary_first,
    vary_second,
)
from tests.benchmarks.samples import moments


def squared_error(x, y):
    return float((x - y).square().sum())


def test_power_one_half_and_no_offset_are_sqrt8():
    m, _ = moments()
    sqrt8 = product_first(m, "sqrt8")
    for same in (power8(m, 0.5), sqrt8_offset(m, 0.0)):
        assert torch.isclose(same, sqrt8, rtol=1e-5, atol=0.0).double().mean() > 0.999  # near ties may differ


def test_softsign8_by_hand():
    m = torch.zeros(1, 1, 128)
    m[0, 0, :3] = torch.tensor([1.0, 0.5, -0.25])
    half, quarter = 85 / 127, 51 / 127  # 127 * 2y / (1 + y) = 84.67, 50.8
    expected = torch.tensor([1.0, half / (2 - half), -quarter / (2 - quarter)])
    torch.testing.assert_close(softsign8(m)[0, 0, :3], expected)


def test_cell_means_have_no_bias():
    # All of them code 21: of its cell all but the edges, where sqrt8's 256ths round up 1/512 below the half.
    root = torch.linspace(20.505 / 127, 21.495 / 127, 1026)[1:-1].view(1, 8, 128)
    m = root.square()
    m[..., 0] = 1.0
    inner = (slice(None), slice(None), slice(1, None))
    biases = [float((decoded - m)[inner].mean()) for decoded in (product_first(m, "sqrt8"), sqrt8_mean(m))]
    assert abs(biases[1]) < 0.2 * abs(biases[0])


def test_searches_are_at_least_as_good_as_their_candidates():
    m, v = moments()
    candidates = [product_first(m, "sqrt8"), softsign8(m)]
    assert squared_error(better_of_two(m, lambda x: x), m) <= min(squared_error(y, m) for y in candidates)
    assert squared_error(searched_power(m, lambda x: x), m) < squared_error(power8(m, 0.5), m)
    found = searched_log_grid(v, torch.sqrt)
    assert squared_error(found.sqrt(), v.sqrt()) <= squared_error(log_grid(v, 32.0).sqrt(), v.sqrt())


@pytest.fixture
def wide():
    """m, v and v as log8 stores it: v over 43 octaves in each group, |m| = sqrt(v) / 2."""
    m, _ = moments(8)
    v = torch.exp(torch.linspace(-40, -10, 128)).expand(1, 8, 128).contiguous()
    return torch.sign(m) * v.sqrt() * 0.5, v, product_second(v, "log8")


def test_a_ratio_keeps_m_whatever_v_spans(wide):
    m, v, stored = wide
    decoded = ratio8(m, stored, stored, 1.0)
    # Half a step of the largest |u|, which log8 makes at most 7% larger than 1/2, and BF16's rounding of it.
    torch.testing.assert_close(decoded / v.sqrt(), m / v.sqrt(), rtol=0.0, atol=0.54 * (0.5 / 127 + 2.0**-8) * 1.07)
    assert squared_error(product_first(m, "sqrt8") / v.sqrt(), m / v.sqrt()) > 10 * squared_error(
        decoded / v.sqrt(), m / v.sqrt()
    )


def test_a_ratio_to_the_exact_v_keeps_the_update(wide):
    m, v, stored = wide
    update = m / v.sqrt()
    exact = ratio8(m, v, stored, 1.0) / stored.sqrt()
    torch.testing.assert_close(exact, update, rtol=2.0**-7, atol=0.0)
    assert squared_error(exact, update) < squared_error(ratio8(m, stored, stored, 1.0) / stored.sqrt(), update)


@pytest.mark.parametrize("code", [log_grid, log8_any_step])
def test_log_grids_keep_the_ends_and_bound_the_ratio(code):
    _, v = moments()
    decoded = code(v)
    positive = v > 0
    spans = torch.log2(maximum_second(v) / torch.where(positive, v, torch.inf).amin(-1, keepdim=True))
    octaves = (torch.log2(decoded) - torch.log2(v)).abs()
    # Half a step; any step in bits is up to 1 / ln 2 steps in octaves.
    slack = 1.0 if code is log_grid else 1.45
    assert (octaves[positive] <= ((spans / 254 * 0.5 * slack) + 2.0**-14).expand_as(v)[positive]).all()
    assert not decoded[~positive].any()


def test_log_grid_ends_at_its_octaves():
    v = torch.exp2(-torch.arange(128.0) / 4).view(1, 1, 128)  # 31.75 octaves
    decoded = log_grid(v, 16.0)
    torch.testing.assert_close(decoded[0, 0, 64:], torch.full((64,), 2.0**-16))
    torch.testing.assert_close(decoded[0, 0, :64], v[0, 0, :64], rtol=0.023, atol=0.0)


def test_fourth_root_by_hand():
    v = torch.zeros(1, 1, 128)
    v[0, 0, :3] = torch.tensor([1.0, 0.5**4, 1e-20])
    torch.testing.assert_close(
        fourth_root8(v)[0, 0, :4], torch.tensor([1.0, (128 / 255) ** 4, (1 / 255) ** 4, 0.0]), rtol=1e-5, atol=0.0
    )


def test_no_variation_breaks_zeros_or_signs():
    m, v = moments()
    for name, decoded in vary_first(m, v, lambda x: x).items():
        assert not decoded[:, -1].any(), name
        assert (decoded * m >= 0).all(), name
    for name, decoded in vary_second(v, torch.sqrt).items():
        assert ((decoded > 0) == (v > 0)).all(), name
