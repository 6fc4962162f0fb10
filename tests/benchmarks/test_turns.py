"""Turns: who goes through the dispatcher, whose figures are whose; every contestant's block on a CPU, all on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks import turns
from benchmarks.turns import CONTESTANTS, dispatched, make_step, take_turns
from overcoat import catalogue
from overcoat.bench.shapes import BlockShape, ModelShape

TINY = BlockShape(ModelShape(64, 128, 1, 2, 1, 64), 2, 16)


def test_the_dispatcher_is_asked_for_and_left_again() -> None:
    asked = catalogue._needs_no_dispatcher
    with dispatched(False):
        assert catalogue._needs_no_dispatcher is asked
    with dispatched(True):
        assert catalogue._needs_no_dispatcher is not asked
        assert catalogue._needs_no_dispatcher(torch.zeros(1)) is False
    assert catalogue._needs_no_dispatcher is asked
    with pytest.raises(RuntimeError, match="a step fails"), dispatched(True):
        raise RuntimeError("a step fails")
    assert catalogue._needs_no_dispatcher is asked


def test_all_are_measured_in_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, order, clock = catalogue._needs_no_dispatcher, [], iter(range(100))

    def steady(step: Any, windows: int, steps: int) -> dict[str, float]:
        order.append((step(), catalogue._needs_no_dispatcher is asked))
        return {"ms": float(next(clock))}

    monkeypatch.setattr(turns, "steady_ms", steady)
    monkeypatch.setattr(turns, "host_ms", lambda step: 10.0 * next(clock))
    # The names alone are these steps' results.
    steps: dict[str, Any] = {name: lambda name=name: name for name in ("eager", "eager, dispatcher")}
    found = take_turns(steps, 3)
    assert order == [("eager", True), ("eager, dispatcher", False)] * 3
    assert found == {
        "eager": {"turns": 3, "ms": 4.0, "least_ms": 0.0, "host_ms": 50.0, "least_host_ms": 10.0},
        "eager, dispatcher": {"turns": 3, "ms": 6.0, "least_ms": 2.0, "host_ms": 70.0, "least_host_ms": 30.0},
    }


@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_contestant_makes_a_step(name: str) -> None:
    """Compiled ones are compiled, once for all steps."""
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    with torch.compiler.set_stance(force_backend=graphs), dispatched(CONTESTANTS[name][1]):
        step = make_step(name, TINY, "cpu")
        for _ in range(2):
            step()
    torch.compiler.reset()
    assert graphs.frame_count == ("compile" in name)


@pytest.mark.gpu
def test_rows_of_a_tiny_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "turns.jsonl"
    monkeypatch.setitem(turns.BLOCKS, "tiny", TINY)
    monkeypatch.setattr(sys, "argv", ["turns", "--shapes", "tiny", "--turns", "2", "--out", str(out)])
    turns.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["name"] for row in rows] == list(CONTESTANTS)
    for row in rows:
        assert 0 < row["least_ms"] <= row["ms"]
        assert 0 < row["least_host_ms"] <= row["host_ms"]
