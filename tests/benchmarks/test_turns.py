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
from overcoat.bench.shapes import BlockShape, ModelShape
from overcoat.kernels import op as catalogue

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
    asked, order, clock = catalogue._needs_no_dispatcher, [], iter(range(1, 100))

    def steady(step: Any, windows: int, steps: int) -> dict[str, float]:
        order.append((step(), catalogue._needs_no_dispatcher is asked))
        return {"ms": float(next(clock))}

    monkeypatch.setattr(turns, "steady_ms", steady)
    monkeypatch.setattr(turns, "host_ms", lambda step: 10.0 * next(clock))
    # The names alone are these steps' results.
    steps: dict[str, Any] = {name: lambda name=name: name for name in ("eager", "eager, dispatcher")}
    found = take_turns(steps, 3)
    one, other = ("eager", True), ("eager, dispatcher", False)
    assert order == [one, other, other, one, other, one]
    # Eager's times are 1, 7 and 11, the other's 3, 5 and 9: the ratio in the middle is not that of the medians.
    assert found == {
        "eager": {"turns": 3, "ms": 7, "least_ms": 1, "of_eager": 1, "host_ms": 80, "least_host_ms": 20},
        "eager, dispatcher": {
            "turns": 3,
            "ms": 5,
            "least_ms": 3,
            "of_eager": 9 / 11,
            "host_ms": 60,
            "least_host_ms": 40,
        },
    }


@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_contestant_makes_a_step(name: str) -> None:
    """Compiled ones are compiled, once for all steps."""
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    with torch.compiler.set_stance(force_backend=graphs), dispatched(CONTESTANTS[name].dispatched):
        step = make_step(name, TINY, "cpu")
        for _ in range(2):
            step()
    torch.compiler.reset()
    assert graphs.frame_count == ("compile" in name)


def test_dynamic_blocks_are_compiled_for_any_number_of_tokens() -> None:
    torch.compiler.reset()
    sizes: list[bool] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        sizes.append(any(isinstance(value, torch.SymInt) for value in values))
        return graph

    for dynamic in (None, True):
        with torch.compiler.set_stance(force_backend=backend):
            make_step("torch.compile", TINY, "cpu", dynamic)()
        torch.compiler.reset()
    assert sizes == [False, True]


@pytest.mark.gpu
def test_rows_of_a_tiny_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "turns.jsonl"
    monkeypatch.setitem(turns.BLOCKS, "tiny", TINY)
    monkeypatch.setattr(
        sys,
        "argv",
        ["turns", "--shapes", "tiny", "--turns", "2", "--out", str(out), "--only", "=torch.compile", "leanest"],
    )
    turns.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    # What another is compared with is measured, too.
    assert {row["name"] for row in rows} == {"torch.compile", "leanest", "leanest, torch.compile", "eager"}
    for row in rows:
        assert 0 < row["least_ms"] <= row["ms"]
        assert row["of_eager"] == 1 if row["name"] in ("eager", "leanest") else row["of_eager"] > 0
        assert row["dynamic"] is False
        assert 0 < row["least_host_ms"] <= row["host_ms"]
