"""Gaps, noise, checks and tables of training runs, on planted rows."""

import pytest

from benchmarks.run_figures import gap_curve
from benchmarks.run_report import (
    comparable,
    gaps,
    markdown,
    repeat_noise,
    seed_noise,
    training_checks,
    training_text,
)


def run_row(run, seed, loss, **changes):
    row = {"data": "d", "config": "c.toml", "set": [], "steps": 10, "num_tokens": 100, "run": run, "seed": seed}
    row |= {"held_out_loss": loss, "train_loss": loss, "tokens_per_second": 1e5}
    return {**row, "optimizer_bytes": 300, "num_parameters": 100, **changes}


def test_gaps_pair_runs_of_one_seed():
    rows = [
        run_row("fp32", 0, 3.0),
        run_row("8bit", 0, 3.004),
        run_row("fp32", 1, 3.1),
        run_row("fp32", 1, 3.2),  # a repetition
        run_row("8bit", 1, 3.14),
        run_row("fp8", 2, 3.0),  # nothing to compare with
    ]
    assert gaps(rows, "fp32") == {"8bit": {0: pytest.approx(0.004), 1: pytest.approx(-0.01)}}
    assert repeat_noise(rows) == pytest.approx(0.1 / 2**0.5)
    assert seed_noise(rows, "fp32") == pytest.approx(0.15)
    assert list(training_checks(rows, "fp32", 0.005).values()) == [True, False, True]  # seed 0, seed 1, their mean
    text = training_text(rows, "fp32", 0.005)
    assert "| 8bit | 0 | 3.0040 | 3.0040 | 3.000 | 100,000 | +0.0040 |" in text
    assert "| 8bit | 2 | -0.0030 | 0.0070 |" in text
    assert "Largest gap between two seeds of fp32: 0.1500" in text


def test_one_seed_has_no_standard_error_and_no_noise():
    rows = [run_row("fp32", 0, 3.0), run_row("8bit", 0, 3.004)]
    text = training_text(rows, "fp32", 0.005)
    assert "| 8bit | 1 | +0.0040 | unknown |" in text
    assert "seeds of" not in text
    assert "repetitions" not in text


def test_figures_that_every_row_has_get_a_column():
    more = {"peak_bytes": 11_250_000_000, "kept_bytes": 6_247_694_724, "epoch_tokens": 50}
    rows = [run_row("bf16", 0, 3.0, **more), run_row("default", 0, 3.02, **more)]
    text = training_text(rows, "bf16", 0.01)
    assert "0.00 M tokens, 2.00 epochs of 0.00 M" in text
    assert "| default | 0 | 3.0200 | 3.0200 | 3.000 | 6,248 | 11.25 | 100,000 | +0.0200 |" in text
    assert "MISSED  default, seed 0: held-out loss within 0.01 of bf16 (+0.0200)" in text
    assert "peak GB" not in training_text([*rows, run_row("paper", 0, 3.0)], "bf16", 0.01)


def test_runs_on_other_tokens_are_not_compared():
    rows = [run_row("fp32", 0, 3.0), run_row("8bit", 0, 3.0, data="e"), run_row("8bit", 0, 3.0, set=["a.b=1"])]
    assert [len(part) for part in comparable(rows)] == [1, 1, 1]
    assert [len(part) for part in comparable([rows[0], run_row("fp8", 1, 3.1)])] == [2]


def test_gap_curve_is_against_the_mean_of_the_same_seed():
    losses = [{"2": 4.0, "4": 3.0}, {"2": 4.2, "4": 3.2}, {"2": 9.0, "4": 9.0}, {"2": 4.0, "4": 3.3}]
    names = [("bf16", 0), ("bf16", 0), ("bf16", 1), ("default", 0)]
    rows = [{"run": run, "seed": seed, "held_out_losses": loss} for (run, seed), loss in zip(names, losses)]
    assert gap_curve(rows[3], rows, "bf16") == {2: pytest.approx(-0.1), 4: pytest.approx(0.2)}
    assert gap_curve(rows[0], rows, "bf16") == {2: pytest.approx(-0.1), 4: pytest.approx(-0.1)}  # its noise
    assert gap_curve(rows[2], rows, "bf16") == {}
    assert gap_curve({**rows[3], "seed": 7}, rows, "bf16") == {}


def test_markdown():
    assert markdown(["a", "b"], [["x", 1]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"
