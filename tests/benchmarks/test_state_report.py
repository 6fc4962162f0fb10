"""Checks and tables of snapshots, on planted rows."""

import pytest

from benchmarks.state_errors import DEFAULT, FLASH, INSTALLED, PAPER, fixed_pairs
from benchmarks.state_report import figure, snapshot_checks, snapshot_text

# What codes of m and v add to an error that meets every check.
COSTS = {
    "e4m3": 4.0, "e4m3x": 1.0, "e5m2": 8.0, "e5m2x": 1.5, "de8": 1.2, "de8x": 0.9, "sqrt8": 0.4, "log8": 0.1,
    "flash32": 0.3, "flash128": 1.0, "sqrt8/32": 0.3, "log8/32": 0.1, "e4m3k": 0.9, "e4m3kr": 0.5,
}  # fmt: skip


def snapshot():
    costs_v = {**COSTS, "de8x": 1.4}
    errors = {}
    for m, v in fixed_pairs():
        if (m, v) != INSTALLED:
            errors[f"{m}|{v}"] = dict.fromkeys(("q", "mlp", "all"), COSTS[m] + costs_v[v])
    return {
        "step": 20,
        "seed": 0,
        "num_tokens": 1000,
        "elements": {"q": 1, "mlp": 1, "all": 2},
        "errors": {**errors, "softsign8|log8": {"q": 0.7, "mlp": 0.8, "all": 0.75}},
        "kept_errors": {},
        "lost": {"flash32": {"q": 1e-5, "mlp": 0.0, "all": 5e-6}},
        "medians": {kind: {"m k": 2.0} for kind in ("q", "mlp", "all")},
        "entropy": {"m/e4m3": 5.5},
    }


def missed(row):
    return [name for name, met in snapshot_checks(row).items() if not met]


def test_a_good_snapshot_meets_every_check():
    assert missed(snapshot()) == []


@pytest.mark.parametrize(
    ("pair", "value", "part"),
    [
        (("e5m2", "e4m3x"), 99.0, "expanding v lowers the error"),
        (("e5m2x", "e5m2"), 99.0, "expanding m lowers the error"),
        (("de8x", "e5m2"), 99.0, "expanding DE8 helps m"),
        (("de8", "de8x"), 0.5, "expanding DE8 helps m"),
        (DEFAULT, 1.1, "at most half"),
        (FLASH, 0.4, "at most FlashOptim's error"),
    ],
)
def test_each_check_can_fail(pair, value, part):
    row = snapshot()
    row["errors"]["|".join(pair)]["all"] = value
    assert any(part in name for name in missed(row))


def test_the_papers_pair_may_be_second_but_not_third():
    row = snapshot()
    row["errors"]["e5m2x|e5m2x"]["all"] = 1.9
    assert missed(row) == []
    row["errors"]["e4m3x|e5m2x"]["all"] = 1.9
    assert any("among the best 2" in name for name in missed(row))


def test_one_worse_type_is_seen():
    row = snapshot()
    row["errors"]["|".join(DEFAULT)]["q"] = 2.1
    assert missed(row) == ["8bit is never worse than the paper's rule on any type"]


def test_the_installed_package_and_its_lost_elements_count():
    row = snapshot()
    key = "|".join(INSTALLED)
    row["errors"][key] = {"q": 9.0, "mlp": 9.0, "all": 9.0}
    row["kept_errors"][key] = {"q": 0.3, "mlp": 0.3, "all": 0.3}
    assert missed(row) == ["8bit has at most FlashOptim's error, FlashOptim's lost v left out"]
    row["errors"][key]["all"] = 0.3
    assert len(missed(row)) == 2


def test_snapshot_text_has_every_table():
    text = snapshot_text(snapshot())
    for part in ("Table 1", "Table 8", "softsign8 x log8", "decoded to 0", "bits used", "MISSED", "## Step 20"):
        assert (part in text) == (part != "MISSED")
    assert "| e4m3x | 5.00 | 2.00 | 9.00 | 2.50 |" in text


def test_figures():
    assert [figure(value) for value in (0.0, 1e-5, 0.0123, 1.0, 12.34, 123.4, 12345.0)] == [
        "0.00", "1e-05", "0.0123", "1.00", "12.3", "123", "1.23e+04",
    ]  # fmt: skip


def test_paper_is_in_table_1():
    assert PAPER in fixed_pairs()
