"""Histograms of ranges, exponents and codes."""

import pytest
import torch

from benchmarks.state_use import OCTAVE_BINS, count_use, entropy, magnitude_code, median, use_table
from tests.benchmarks.samples import moments


def test_counts_cover_what_is_not_zero():
    m, v = moments()
    m[0, 0, :5] = 0.0
    counts = count_use(m, v, 1e-8)
    groups = m.shape[1] - 1  # one is all zero
    for key, x in (("m", m), ("v", v)):
        for name in ("octaves", "octaves expanded", "exponents", "exponents searched"):
            assert int(counts[f"{key}/{name}"].sum()) == groups
        for name in ("e4m3", "e4m3x"):
            assert int(counts[f"{key}/{name}"].sum()) == int((x != 0).sum())


def test_octaves_of_a_known_group():
    m = torch.ones(1, 1, 128)
    m[0, 0, 0] = -(2.0**-5)
    counts = count_use(m, m.square(), 1e-8)
    assert int(counts["m/octaves"].argmax()) == 10
    assert int(counts["v/octaves"].argmax()) == 20
    assert int(counts["m/exponents"].argmax()) == int(16 * 17.807 / 5)
    expanded = int(counts["m/octaves expanded"].argmax()) / 2
    assert 17.0 <= expanded <= 17.807  # as far as a k in sixteenths goes, and not beyond the format's range


def test_expansion_fills_the_range_of_e4m3():
    m, v = moments()
    counts = count_use(m, v, 1e-8)
    for key in ("m", "v"):
        before, after = (median(counts[f"{key}/{name}"]) / 2 for name in ("octaves", "octaves expanded"))
        assert before < 15
        assert 17.0 <= after <= 18.0
        assert entropy(counts[f"{key}/e4m3x"]) > entropy(counts[f"{key}/e4m3"])


def test_magnitude_codes_ascend_with_the_value():
    values = torch.tensor([0.0, 2.0**-9, -0.5, 1.0, -448.0])
    assert magnitude_code(values.to(torch.float8_e4m3fn)).tolist() == [0, 1, 0x30, 0x38, 126]
    assert magnitude_code(torch.tensor([-127, 0, 3], dtype=torch.int8)).tolist() == [127, 0, 3]
    assert magnitude_code(torch.tensor([255, 1], dtype=torch.uint8)).tolist() == [255, 1]


def test_entropy_and_median():
    assert entropy(torch.tensor([5, 0, 5, 5, 5])) == pytest.approx(2.0)
    assert entropy(torch.tensor([0, 7])) == 0.0
    assert median(torch.tensor([1, 0, 3, 1])) == 2
    assert median(torch.tensor([0, 2, 2])) == 1


def test_table_pools_types():
    m, v = moments()
    parts = {"q": count_use(m[:, :30], v[:, :30], 1e-8), "mlp": count_use(m[:, 30:], v[:, 30:], 1e-8)}
    table = use_table(parts)
    whole = count_use(m, v, 1e-8)
    assert table["histograms"] == {name: value.tolist() for name, value in whole.items()}
    assert len(table["histograms"]["m/octaves"]) == OCTAVE_BINS
    assert table["medians"]["all"]["m k"] == median(whole["m/exponents"]) / 16
    assert set(table["medians"]) == {"q", "mlp", "all"}
