"""What a run leaves for its reader: the table's figures, and how a second run relates to the first."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from overcoat.train.run import RunResult
from overcoat.train.summary import summarize
from tests.train.runs import row

ROWS = [row(1, loss=8.0), row(2, loss=6.0), {"kind": "eval", "step": 2, "loss": 6.5}]


def result(folder: Path, title: str, device: str, **figures: float) -> RunResult:
    metrics = folder / f"{title}.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values = {"train_loss": 7.0, "held_out_loss": 6.5, "tokens_per_second": 1000.0, **figures}
    return RunResult(
        title=title, steps=2, num_tokens=2_000_000, num_parameters=4_000_000, peak_bytes=10**9, kept_bytes=3 * 10**6,
        optimizer_bytes=12_000_000, device=device, checkpoint="step-2", export="export", metrics=str(metrics),
        sample="def f():", **values,
    )  # fmt: skip


def printed(results: list[RunResult], folder: Path) -> str:
    console = Console(file=io.StringIO(), width=140)
    summary = summarize(results, folder, console)
    assert json.loads((folder / "results.json").read_text()) == summary
    assert (folder / "loss.png").stat().st_size > 1000
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_two_runs_are_compared(tmp_path: Path) -> None:
    ours = result(tmp_path, "Overcoat", "NVIDIA H200", held_out_loss=6.63, tokens_per_second=3000.0)
    text = printed([ours, result(tmp_path, "BF16", "NVIDIA H200")], tmp_path)
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│") and "│" in line[1:]}
    assert "4.0 M parameters, 2.00 M tokens" in text
    assert "+2.00 %" in lines["held-out loss"]
    assert "3.000 x" in lines["tokens / s (median)"]
    assert "3.00" in lines["optimizer bytes / parameter"]
    assert "peak GPU memory" in lines
    assert "def f():" in text
    assert "emulated" not in text
    summary = json.loads((tmp_path / "results.json").read_text())
    assert summary["held_out_gap"] == pytest.approx(0.02)


def test_a_cpu_says_that_its_speed_is_none(tmp_path: Path) -> None:
    text = printed([result(tmp_path, "Overcoat", "CPU")], tmp_path)
    assert "emulated" in text
    assert "peak GPU memory" not in text
    assert "held_out_gap" not in json.loads((tmp_path / "results.json").read_text())
