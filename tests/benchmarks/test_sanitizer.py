"""`benchmarks.sanitizer` with a script in place of compute-sanitizer."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from benchmarks import sanitizer

SCRIPT = """#!/bin/sh
echo "$PYTORCH_NO_CUDA_MEMORY_CACHING; $*" >> {seen}
case "$*" in *slow*) exec sleep 60;; esac
case "$*" in *bad*) echo "========= Invalid __global__ write of size 4 bytes"; echo "1 failed, 2 passed in 3.0s";; *)
echo "3 passed in 2.0s";; esac
case "$*" in
*racecheck*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
*bad*) echo "========= ERROR SUMMARY: 7 errors";;
*broken*) exit 3;;
*) echo "========= ERROR SUMMARY: 0 errors";; esac
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the script was called with, a line each."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(SCRIPT.format(seen=tmp_path / "seen"))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "seen"


def test_errors_and_results_are_read(seen: Path) -> None:
    assert sanitizer.check("memcheck", ["good"], False, 30) == {"errors": 0, "result": "3 passed in 2.0s", "said": []}
    assert sanitizer.check("racecheck", ["good"], False, 30)["errors"] == 0
    bad = sanitizer.check("memcheck", ["bad"], False, 30)
    assert (bad["errors"], bad["result"]) == (7, "1 failed, 2 passed in 3.0s")
    assert bad["said"] == ["========= Invalid __global__ write of size 4 bytes"]


def test_what_does_not_end_is_not_clean(seen: Path) -> None:
    assert sanitizer.check("memcheck", ["slow"], False, 0.5)["errors"] is None
    assert sanitizer.check("memcheck", ["broken"], False, 30)["errors"] is None
