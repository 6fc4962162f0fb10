"""Word problems: solutions that are right, splits that do not meet, the same from the same seed."""

from __future__ import annotations

import re

import pytest

from overcoat.paper import problems as module
from overcoat.paper.problems import EASY, NEW, SPLITS, TEMPLATES, Problem, problems

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
