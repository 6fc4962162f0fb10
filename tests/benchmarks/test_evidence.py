"""Jobs of `benchmarks.evidence`, played by a module that writes down when and where it ran."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import evidence
from benchmarks.evidence import JOBS, Job

MODULE = """
import json, os, subprocess, sys, time
name, rows, seconds, status = sys.argv[1:5]
start = time.time()
if seconds == "forever":
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(3); open('{rows}/survived', 'w')"])
    seconds = 60
time.sleep(float(seconds))
row = dict(name=name, start=start, end=time.time(), gpu=os.environ["CUDA_VISIBLE_DEVICES"], left=sys.argv[5:],
           cores=sorted(os.sched_getaffinity(0)))
open(f"{rows}/rows.jsonl", "a").write(json.dumps(row) + chr(10))
print("said", name)
sys.exit(int(status))
"""

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, "{root}")
from benchmarks import evidence
evidence.ROOT = Path("{folder}")
evidence.JOBS = [evidence.Job(name, f"job {{name}} {{{{rows}}}} 30 0", 1) for name in ("a", "b", "waits")]
sys.argv = ["evidence", "--minutes", "1", "--out", "{folder}/rows", "--logs", "{folder}/logs"]
evidence.program()
"""


def job(name: str, takes: Any = 0.3, status: int = 0, seconds: int = 1, alone: bool = False) -> Job:
    return Job(name, f"job '{name}' {{rows}} {takes} {status} {{left}} {{cores}}", seconds, alone)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run jobs on two GPUs: exit status and rows by name."""
    (tmp_path / "job.py").write_text(MODULE)
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    def call(*jobs: Job, minutes: float = 1.0, only: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(evidence, "JOBS", list(jobs))
        words = ["--only", *only] if only else []
        folders = ["--out", str(tmp_path / "rows"), "--logs", str(tmp_path / "logs")]
        status = evidence.main(["--minutes", str(minutes), *folders, *words])
        file = tmp_path / "rows" / "rows.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return status, {row["name"]: row for row in rows}

    return call


def test_who_times_the_host_has_the_machine_and_the_others_share_it(run: Any, tmp_path: Path) -> None:
    jobs = [job("a"), job("host 1", alone=True), job("b"), job("c"), job("host 2", alone=True)]
    status, rows = run(*jobs)
    assert status == 0
    assert set(rows) == {"a", "b", "c", "host 1", "host 2"}
    assert rows["host 1"]["end"] <= rows["host 2"]["start"]
    everything = sorted(os.sched_getaffinity(0))
    for name in "abc":
        assert rows["host 2"]["end"] <= rows[name]["start"]
    assert {rows[name]["gpu"] for name in "abc"} == {"3", "5"}
    assert rows["a"]["start"] < rows["b"]["end"] and rows["b"]["start"] < rows["a"]["end"]  # noqa: PT018
    assert rows["host 1"]["gpu"] == rows["host 2"]["gpu"] == "3"
    assert rows["host 1"]["cores"] == everything
    if len(everything) > 1:
        assert not set(rows["a"]["cores"]) & set(rows["b"]["cores"])
    left, cores = rows["a"]["left"]
    assert 20 <= int(left) <= 60 - evidence.MARGIN
    assert int(cores) == len(rows["a"]["cores"])
    assert (tmp_path / "logs" / "host-1.log").read_text() == "said host 1\n"


def test_what_does_not_fit_does_not_begin(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The next that fits does, though it comes later."""
    status, rows = run(job("long", seconds=100), job("short"))
    assert status == 1
    assert set(rows) == {"short"}
    assert re.search(r"^long +not begun$", capsys.readouterr().out, re.MULTILINE)


def test_what_has_not_ended_is_killed_with_what_it_started(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    status, rows = run(job("hangs", "forever"), job("ends"), minutes=2 / 60)
    assert status == 1
    assert set(rows) == {"ends"}
    assert time.monotonic() - begin < 20
    assert re.search(r"^hangs +cut off after \d s$", capsys.readouterr().out, re.MULTILINE)
    time.sleep(max(0.0, begin + 4 - time.monotonic()))
    assert not (tmp_path / "rows" / "survived").exists()


def test_a_failure_is_said_and_the_others_go_on(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = run(job("bad", status=2), job("good"), job("better"))
    assert status == 1
    assert set(rows) == {"bad", "good", "better"}
    out = capsys.readouterr().out
    assert re.search(r"^bad +exit 2 after \d s$", out, re.MULTILINE)
    assert re.search(r"^good +exit 0 after \d s$", out, re.MULTILINE)


def test_some_by_name(run: Any) -> None:
    _, rows = run(job("suite"), job("layer a"), job("layer b"), job("layer"), only=("suite", "=layer"))
    assert set(rows) == {"suite", "layer"}


def test_a_name_that_no_job_has(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(job("suite"), job("kernels"), only=("layers",))
    assert "no job has a name like layers: suite, kernels" in capsys.readouterr().err


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(evidence.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        evidence.main([])
    assert "PyTorch sees no GPU" in capsys.readouterr().err


def test_every_part_of_the_cores_is_used_once() -> None:
    assert evidence.shares(set(range(10)), 2) == [{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}]
    assert evidence.shares({4, 7, 9}, 2) == [{4}, {7}]
    assert evidence.shares({4}, 2) == [{4}, {4}]


class UnderstoodError(Exception):
    """Ends a command when its words have been read."""


@pytest.mark.parametrize("real", JOBS, ids=[real.name for real in JOBS])
def test_the_real_commands_are_understood(real: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each module's own parser takes the words."""
    fields = {"rows": tmp_path, "left": 100, "soon": 40, "cores": 2}
    module, *words = [word.format(**fields) for word in shlex.split(real.command)]
    original = argparse.ArgumentParser.parse_known_args

    def parse(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Any:
        parsed, rest = original(parser, *arguments, **options)
        if " " in parser.prog:  # of a subcommand
            return parsed, rest
        assert not rest
        raise UnderstoodError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(UnderstoodError):
        importlib.import_module(module).main()


def test_whoever_ends_it_ends_its_jobs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=evidence.ROOT, folder=tmp_path))
    (tmp_path / "job.py").write_text(MODULE)
    process = subprocess.Popen([sys.executable, program], env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"})
    end = time.monotonic() + 60
    while len(list((tmp_path / "logs").glob("*.log"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1)  # until both are known to have begun
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not (tmp_path / "rows" / "rows.jsonl").exists()
    listed = subprocess.run(["ps", "-e", "-o", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path / "rows") not in listed


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.main(["--list", "--only", "kernels"]) == 0
    assert capsys.readouterr().out.split()[:3] == ["kernels", "60", "s"]
