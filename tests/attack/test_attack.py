"""The attack in CI, in a process of its own (it forks, and so must have no threads); and that it can find something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack.harness import Child, Ended
from tests.attack.judge import attempt, judge

ROOT = Path(__file__).parents[2]


def attack(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "tests.attack", *arguments], cwd=ROOT, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def test_a_short_attack_finds_nothing() -> None:
    done = attack("--short", "--seed", "0")
    assert done.returncode == 0, done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["configs", "kills", "damage", "disk", "two", "library"])
def test_a_long_attack_finds_nothing(kind: str) -> None:
    done = attack(kind)  # on a seed nobody chose; the output names it
    print(done.stdout)
    assert done.returncode == 0, done.stdout


def ended(status: int, error: str = "", is_late: bool = False) -> Ended:
    return Ended(status, is_late, "", error)


def test_only_success_and_one_line_of_error_pass() -> None:
    assert ended(0).fault() == ""
    assert ended(2, "a warning\novercoat: train.steps = 0: at least 1\n").fault() == ""
    assert ended(143).fault(143) == ""
    assert ended(-signal.SIGKILL).fault(-signal.SIGKILL) == ""
    trace = "Traceback (most recent call last):\n  File ...\nOSError: [Errno 28] No space left\n"
    assert ended(1, trace).fault() == "traceback: OSError: [Errno 28] No space left"
    assert "not one line" in ended(2, "").fault()
    assert "not one line" in ended(2, "overcoat: cannot load:\nmore words\n").fault()
    assert "dies of SIGSEGV" in ended(-signal.SIGSEGV).fault()
    assert "does not end" in ended(-signal.SIGTERM, is_late=True).fault(-signal.SIGTERM)


def test_torch_decides_what_is_right() -> None:
    import torch

    one, error = torch.ones(3), IndexError("out of bounds")
    assert judge((one, None), (one, None)) == ""
    assert judge((None, error), (None, RuntimeError("too large"))) == ""
    assert judge((one, None), (None, ValueError("not supported"))) == ""
    assert "no clear refusal" in judge((one, None), (None, error))
    assert "in silence" in judge((None, error), (one, None))
    assert "other numbers" in judge((one, None), (2 * one, None))
    assert "other numbers" in judge((one, None), (one * float("nan"), None))
    assert attempt(lambda: 1) == (1, None)


@pytest.mark.parametrize("wrong", ["nothing", "numbers", "exit"])
def test_a_child_reports_how_it_ended(wrong: str, tmp_path: Path) -> None:
    def work() -> int:
        if wrong == "exit":
            raise SystemExit(2)
        print("out")
        return 1 / 0 if wrong == "numbers" else 0  # type: ignore[return-value]

    found = Child(work, tmp_path).wait()
    assert found.status == {"nothing": 0, "numbers": 1, "exit": 2}[wrong]
    assert found.output == ("" if wrong == "exit" else "out\n")
    assert ("ZeroDivisionError" in found.fault()) == (wrong == "numbers")
