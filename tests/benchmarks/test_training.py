"""`benchmarks.training`: settings of each run, gaps on planted rows, and one tiny run from training to its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper.arms import ARMS
from benchmarks.report import gaps, noise, table
from benchmarks.report import main as report_main
from benchmarks.training import main
from overcoat.train.configfile import build_config, dump_toml, load_config
from tests.train.conftest import TINY, corpus_files

__all__ = ["corpus_files"]  # a fixture


@pytest.fixture
def tiny(tmp_path: Path, corpus_files: str) -> Path:
    """The tiny run as a config file."""
    config = tmp_path / "tiny.toml"
    values = {**TINY, "train": {**TINY["train"], "run_dir": "unused"}}
    config.write_text(dump_toml(build_config(values, [f"data.files={corpus_files}", "train.steps=4"])))
    return config


@pytest.mark.parametrize("name", ARMS)
def test_the_settings_of_every_run_are_valid(tiny: Path, name: str) -> None:
    config = load_config(tiny, ARMS[name])
    assert (config.recipe.name == "bf16") == name.startswith("bf16")
    exact = name in ("bf16", "bf16-head", "default-fp32")
    assert (config.optimizer.moments == "fp32") == exact


def test_from_training_to_a_row(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERCOAT_COMMIT", "tested")
    out = tmp_path / "training.jsonl"
    out.write_text('{"date": "2026-01-01", "runs": {}}\n')  # rows of other kinds are left alone
    arguments = ["--config", str(tiny), "--out", str(out), "--figures", str(tmp_path), "--data", str(tmp_path / "data")]
    main([*arguments, "--runs", "default", "--steps", "6"])
    row = json.loads(out.read_text().splitlines()[1])
    assert (row["run"], row["seed"], row["steps"], row["num_tokens"]) == ("default", 0, 6, 6 * 2 * 32)
    assert len(row["train_losses"]) == len(row["held_out_losses"]) == 6
    assert len(row["data"]) == 64
    assert 0 < row["optimizer_bytes"] < 4 * row["num_parameters"]
    assert "| default | 0 |" in capsys.readouterr().out
    assert (tmp_path / "training-0m.png").stat().st_size > 0


def row_of(run: str, seed: int, loss: float, **changes: Any) -> dict[str, Any]:
    row = {"data": "d", "config": "c.toml", "set": [], "steps": 10, "num_tokens": 100, "run": run, "seed": seed}
    return {**row, "held_out_loss": loss, "tokens_per_second": 1e5, "num_parameters": 100, "peak_bytes": 1e9, **changes}


def test_gaps_pair_runs_of_one_seed() -> None:
    rows = [
        row_of("bf16", 0, 3.0),
        row_of("default", 0, 3.004),
        row_of("bf16", 1, 3.1),
        row_of("bf16", 1, 3.2),  # a repetition
        row_of("default", 1, 3.14),
        row_of("paper", 2, 3.0),  # nothing to compare with
    ]
    assert gaps(rows) == {"default": {0: pytest.approx(0.004), 1: pytest.approx(-0.01)}}
    assert noise(rows) == pytest.approx(0.1 / 2**0.5)
    text = table(rows)
    assert "| default | 0 | 3.0040 | +0.0040 | 100,000 | 1.00 |" in text
    assert "Mean gap of default over 2 seeds: -0.0030 +- 0.0070" in text


def test_curves_of_an_exhibit(tmp_path: Path) -> None:
    """The longest runs of it; rows without curves, or of another exhibit, are left out."""
    curves = {"train_losses": {"1": 3.0, "10": 2.0}, "held_out_losses": {"5": 2.5, "10": 2.0}}
    runs = [
        row_of("", seed, 2.0, arm=arm, exhibit="table3", **curves) for arm in ("bf16", "default") for seed in (0, 1)
    ]
    others = [row_of("", 0, 2.0, exhibit="table4"), row_of("", 2, 2.0, arm="bf16", exhibit="table3")]
    (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in [*runs, *others]))
    report_main([str(tmp_path / "rows"), "table3", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").stat().st_size > 0
