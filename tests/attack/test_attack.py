"""The attack in CI, in a process of its own (it forks, and so must have no threads); and that it can find something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.attack.harness import Child, Ended
from tests.attack.library import attempt, judge
from tests.attack.processes import said_once


@pytest.mark.parametrize("size", ["short", pytest.param("minute", marks=pytest.mark.nightly)])
def test_an_attack_finds_nothing(size: str) -> None:
    command = [sys.executable, "-m", "tests.attack", "--size", size, "--seed", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("status", "error", "fault"), [
    (0, "", None), (143, "", None), (2, "a warning\novercoat: train.steps = 0: at least 1\n", None),
    (1, "Traceback (most recent call last):\n  File\nOSError: no space\n", "traceback: OSError: no space"),
    (-signal.SIGSEGV, "", "dies of SIGSEGV"),
    (2, "", "not one line"), (2, "overcoat: cannot load:\nmore words\n", "not one line"),
])  # fmt: skip
def test_only_success_and_one_line_of_error_pass(status: int, error: str, fault: str | None) -> None:
    found = Ended(status, False, "", error).fault(143)
    assert fault in found if fault else found == ""
    assert "does not end" in Ended(-signal.SIGTERM, True, "", "").fault(-signal.SIGTERM)


@pytest.mark.parametrize(("ends", "fault"), [
    ([(2, "overcoat: rank 1: no memory\n"), (-15, "")], None),
    ([(2, "overcoat: no memory\n"), (-15, "")], "not one line"),
    ([(2, "overcoat: rank 1: no memory\n")] * 2, "not one line"), ([(2, ""), (-15, "")], "not one line"),
    ([(2, "overcoat: rank 1: no memory\n"), (0, "")], "as if nothing was wrong"),
])  # fmt: skip
def test_of_several_processes_one_says_why(ends: list[tuple[int, str]], fault: str | None) -> None:
    found = said_once([Ended(status, False, "", error) for status, error in ends], "rank 1", "memory")
    assert fault in found if fault else found == ""


def test_torch_decides_what_is_right() -> None:
    one, error = torch.ones(3), IndexError("out of bounds")
    for own in ((one, None), (None, ValueError("not supported"))):
        assert judge((one, None), own) == ""
    assert judge((None, error), (None, RuntimeError("too large"))) == ""
    assert "no clear refusal" in judge((one, None), (None, error))
    assert "in silence" in judge((None, error), (one, None))
    for wrong in (2 * one, one * float("nan")):
        assert "other numbers" in judge((one, None), (wrong, None))
    assert attempt(lambda: 1) == (1, None)


@pytest.mark.parametrize(("wrong", "status"), [("nothing", 0), ("numbers", 1), ("exit", 2)])
def test_a_child_reports_how_it_ended(wrong: str, status: int, tmp_path: Path) -> None:
    def work() -> int:
        print("out")
        if wrong == "exit":
            raise SystemExit(2)
        return 1 // 0 if wrong == "numbers" else 0

    found = Child(work, tmp_path).wait()
    assert (found.status, found.output) == (status, "out\n")
    assert ("ZeroDivisionError" in found.fault()) == (wrong == "numbers")
