"""Result rows: what they say about where they come from, and that they can be read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from overcoat.bench import rows


def test_a_row_says_when_where_and_with_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OVERCOAT_COMMIT", "abc1234")
    row = rows.environment("overcoat bench layer")
    assert list(row) == ["date", "commit", "gpu", "torch", "triton", "peers", "command"]
    assert (row["commit"], row["command"], row["torch"]) == ("abc1234", "overcoat bench layer", torch.__version__)
    assert row["peers"]["transformers"]
    assert len(row["date"]) == len("2026-01-01T00:00:00Z")
    path = tmp_path / "new" / "rows.jsonl"
    rows.append_row(path, {"ms": 1.5}, {"gpu": "some"})
    rows.append_row(path, {"name": "x", "error": "none"})
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"gpu": "some", "ms": 1.5}
    assert second == {**row, "command": second["command"], "name": "x", "error": "none"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bench", "layer", "--json", "benchmarks/results/layer.jsonl"], "bench layer --json layer.jsonl"),
        (["bench", "layer", "--json=/home/me/layer.jsonl"], "bench layer --json=layer.jsonl"),
        (["bench", "model", "--plot", "plots/a b.png"], "bench model --plot 'a b.png'"),
        (["states", "runs/124m/step-100"], "states runs/124m/step-100"),
        (["states", "/home/me/step-100", "data.dir=/home/me/data"], "states step-100 data.dir=data"),
    ],
)
def test_the_command_is_told_without_this_machines_directories(arguments: list[str], expected: str) -> None:
    assert rows.command_line("overcoat", arguments) == f"overcoat {expected}"
