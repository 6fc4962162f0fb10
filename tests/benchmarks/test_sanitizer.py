"""`benchmarks.sanitizer` with a script in place of compute-sanitizer."""

from __future__ import annotations

import json
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


def test_rows_and_who_has_the_cache(seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = ["test_sum", "test_a_graph_replays", "test_step"]
    monkeypatch.setattr(sanitizer, "tests_of", lambda tool, path: [f"{path}::{test}" for test in tests])
    out = tmp_path / "rows.jsonl"
    assert sanitizer.main(["--files", "good", "bad", "--out", str(out), "--processes", "1"]) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["tool"] for row in rows] == ["memcheck", "racecheck"]
    assert {path: [part["errors"] for part in found] for path, found in rows[0]["files"].items()} == {
        "good": [0, 0],
        "bad": [7, 7],
    }
    calls = seen.read_text().splitlines()
    alone = [call for call in calls if "memcheck" in call and call.startswith("1;")]
    assert [call.count("graph_replays") for call in alone] == [0, 0]
    assert sum(call.startswith("1;") for call in calls) == 2


def test_a_deadline_is_said(seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "tests_of", lambda tool, path: [f"{path}::test_sum"])
    out = tmp_path / "rows.jsonl"
    options = ["--tools", "memcheck", "--files", "slow", "good", "--deadline", "0.5", "--processes", "1"]
    assert sanitizer.main([*options, "--out", str(out)]) == 1
    files = json.loads(out.read_text())["files"]
    assert files["slow"][0]["result"].startswith("not ended")
    assert files["good"][0]["result"] == "not started"


def test_every_test_goes_to_one_process() -> None:
    assert sanitizer.parts_of(["a", "b", "c", "d", "e"], 2) == [["a", "d"], ["b", "e"], ["c"]]
    assert sanitizer.parts_of([], 2) == []


def test_files_with_kernels_are_found() -> None:
    assert "tests/models/test_decoder.py" in sanitizer.test_files("memcheck")
    assert not any(path.startswith("tests/train") for path in sanitizer.test_files("memcheck"))
    kernels = sanitizer.test_files("racecheck")
    assert kernels
    assert all(path.startswith(sanitizer.KERNELS) for path in kernels)
