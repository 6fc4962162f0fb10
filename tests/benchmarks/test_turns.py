"""`benchmarks.turns`: two revisions side by side, whose figures are whose, and every kind of step on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import overcoat
from benchmarks import turns
from benchmarks.turns import RECIPES, Step, block_step, load_revision, take_turns


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_step_leaves_gradients(recipe: str) -> None:
    step = block_step(overcoat, recipe, 128, "cpu", batch=1, length=16)
    y = step.forward()
    assert y.shape == (1, 16, 128)
    step.finish(y)
    step()  # again: gradients are made anew
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(torch.ones_like(y))


@pytest.mark.skipif(not (turns.ROOT / ".git").exists(), reason="needs the git repository")
def test_two_revisions_in_one_process(tmp_path: Path) -> None:
    """The same block of HEAD under another name: its own classes and ops."""
    old = load_revision("HEAD", tmp_path, "overcoat_head")
    assert old.Recipe is not overcoat.Recipe
    assert Path(old.__file__ or "").is_relative_to(tmp_path)
    y = block_step(old, "default", 128, "cpu", batch=1, length=16).forward()
    assert y.isfinite().all()
    assert hasattr(torch.ops, "overcoat_head")


def test_ratios_are_of_the_same_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter(range(1, 100))

    def steady(step: Callable[[], str], windows: int, steps: int) -> dict[str, float]:
        order.append(step())
        return {"ms": float(next(clock))}

    monkeypatch.setattr(turns, "steady_ms", steady)
    monkeypatch.setattr(turns, "host_ms", lambda step, repeats: 10.0 * next(clock))
    # The names alone are these steps' results.
    steps: Any = {name: lambda name=name: name for name in ("new", "old")}
    found = take_turns(steps, 3, 1)
    assert order == ["new", "old", "old", "new", "new", "old"]
    # New takes 1, 7 and 9, old 3, 5 and 11: the middle ratio is not that of the medians.
    assert found["ms"] == {"new": 7, "old": 5}
    assert found["ratio"] == 9 / 11
    assert found["host_ratio"] == 10 / 12


@pytest.mark.gpu
def test_kept_bytes_are_those_between_the_halves() -> None:
    def forward() -> torch.Tensor:
        torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")  # freed before the first half ends
        return torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")

    found = turns.memory_of(Step(forward, lambda kept: None))
    assert found == {"kept": 1 << 20, "peak": 3 << 20}
