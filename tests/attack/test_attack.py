"""The attack in CI, in a process of its own (it forks, and so must have no threads); and that it can find something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("size", ["short", pytest.param("minute", marks=pytest.mark.nightly)])
def test_an_attack_finds_nothing(size: str) -> None:
    command = [sys.executable, "-m", "tests.attack", "--size", size, "--seed", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
