"""Word problems: solutions that are right, splits that do not meet, the same from the same seed."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.paper import problems as module
from benchmarks.paper.problems import EASY, NEW, SPLITS, TEMPLATES, Problem, problems
from benchmarks.paper.states import analyse, table1

FOUND = {split: problems(split, 600) for split in SPLITS}


def test_every_template_occurs_and_its_steps_are_right() -> None:
    seen: set[int] = set()
    for problem in (problem for split in FOUND.values() for problem in split):
        seen.add(problem.template)
        steps = re.findall(r": ([\d */+-]+) = (\d+)\.", problem.completion)
        assert len(steps) == len(TEMPLATES[problem.template].steps)
        assert all(eval(left) == int(right) for left, right in steps), problem
        assert int(steps[-1][1]) == problem.answer > -1
        assert problem.completion.endswith(f" The answer is {problem.answer}.")
        assert not re.search(r"[{}|]", problem.prompt + problem.completion)
    assert seen == set(range(len(TEMPLATES)))
    assert len(TEMPLATES) >= 40
    assert sum(len(template.steps) > 1 for template in TEMPLATES) > 40


def test_what_is_held_out_is_never_trained_on() -> None:
    def numbers(problem: Problem) -> tuple[int, ...]:
        return (problem.template, *map(int, re.findall(r"\d+", problem.prompt)))

    trained = {numbers(problem) for split in ("train", "easy") for problem in problems(split, 5000, seed=1)}
    assert not trained & {numbers(problem) for problem in FOUND["numbers"]}
    assert {problem.template for problem in FOUND["templates"]} == NEW
    assert not NEW & {place[0] for place in trained}
    assert {problem.template for problem in FOUND["easy"]} == EASY


def test_a_seed_decides_and_no_problem_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems("train", 50, seed=3) == problems("train", 100, seed=3)[:50] != problems("train", 50, seed=4)
    assert len({problem.prompt for problem in FOUND["train"]}) == 600
    for name, value in {"NAMES": ("A", "B"), "THINGS": ("pens",), "EASY": {2}}.items():
        monkeypatch.setattr(module, name, value)
    assert len(problems("easy", 60)) == 60
    with pytest.raises(ValueError, match=r"the split 'easy' has fewer"):
        problems("easy", 200)
    with pytest.raises(ValueError, match="split 'test': choose one of train"):
        problems("test", 1)


# ---- Errors of moment codes: a checkpoint with known moments from file to table -------------------------------------


def moments(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """m and v (rows, 200) FP32 with log-normal scales; 200 leaves a padded group."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp(2 * torch.randn(rows, 1, generator=generator) - 9)
    root = scale * torch.exp(0.7 * torch.randn(rows, 200, generator=generator))
    return root * (0.25 * torch.randn(rows, 200, generator=generator)).clamp(-1, 1), root.square()


def save(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    m, v = moments(16)
    state = {0: {"exp_avg": m.to(dtype), "exp_avg_sq": v.to(dtype)}, 1: {"exp_avg": m[0], "exp_avg_sq": v[0]}}
    torch.save({"optimizer": {"state": state}}, folder / "training.pt")
    return folder


def test_from_checkpoint_to_table(tmp_path: Path) -> None:
    found = analyse(save(tmp_path), 1e-8, "cpu")
    assert found["fp32 fp32"] < 1e-9
    assert 0 < found["ratio8 log8"] < found["sqrt8 log8"] < found["e4m3x e4m3x"] < found["e4m3 e4m3"]
    assert found["fp32 log8"] < found["ratio8 log8"]
    rows = {row["name"]: row for row in table1(Namespace(size="full", checkpoint=tmp_path)).rows}
    assert rows["m e4m3x, v e4m3x"]["ours"] == pytest.approx(found["e4m3x e4m3x"])
    assert rows["m e4m3x, v e4m3x"]["paper / E4M3"] == pytest.approx(12.31 / 20.10)


def test_what_is_no_run_with_fp32_moments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run directory or checkpoint"):
        table1(Namespace(size="full", checkpoint=tmp_path))
    with pytest.raises(ValueError, match=r"moments are torch\.bfloat16; train with optimizer\.moments=fp32"):
        analyse(save(tmp_path, torch.bfloat16), 1e-8, "cpu")
