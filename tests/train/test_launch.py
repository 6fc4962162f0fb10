"""`overcoat train --gpus N`: real launches on the CPU, and workers that are killed."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from overcoat import cli
from overcoat.train import process
from overcoat.train.config import Config
from overcoat.train.configfile import build_config, dump_toml, load_config
from overcoat.train.launch import _cause, _explain, launch
from overcoat.train.out_of_memory import RESTART
from overcoat.train.run import run_once
from tests.processes import on_two
from tests.train.conftest import TINY
from tests.train.runs import losses

ROOT = Path(__file__).parents[2]


def write_config(folder: Path, corpus_files: str, *words: str) -> Path:
    places = [f"data.files={corpus_files}", f"data.cache_dir={folder / 'data'}"]
    sizes = ["train.batch_size=1", "train.accumulation=12", "train.steps=8", "checkpoint.every=2", "checkpoint.keep=9"]
    path = folder / "tiny.toml"
    path.write_text(dump_toml(build_config(TINY, [*places, *sizes, *words])))
    return path


class Launcher:
    """`overcoat train` in a process that has imported what it needs; its workers are Python's own, as a user's are."""

    def __init__(self, config: Path, run_dir: Path, gpus: int, *options: str) -> None:
        words = ["train", str(config), f"train.run_dir={run_dir}", *options]
        self.said = run_dir.with_suffix(".txt")
        arguments = (words + ["--gpus", str(gpus)] * (gpus > 1), self.said)
        self.process = multiprocessing.get_context("forkserver").Process(target=_launch, args=arguments)
        self.process.start()

    def is_running(self) -> bool:
        return self.process.exitcode is None

    def wait(self, seconds: float) -> int:
        """Its exit status; it ends with whoever waits no longer."""
        self.process.join(seconds)
        if self.is_running():
            for pid in [*self.workers(), self.process.pid]:
                os.kill(pid, signal.SIGKILL)
        assert self.process.exitcode is not None
        return self.process.exitcode

    def workers(self) -> list[int]:
        pid = self.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def lines(self) -> list[str]:
        return [line for line in self.said.read_text().splitlines() if line.startswith("overcoat:")]


def _launch(words: list[str], said: Path) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.exit(cli.main(words))


def kill_after(step: int, launcher: Launcher, run_dir: Path, place: int) -> None:
    """One worker, once the checkpoint of a step is there."""
    while not (run_dir / f"checkpoints/step-{step:08d}").exists() and launcher.is_running():
        time.sleep(0.05)
    os.kill(launcher.workers()[place], signal.SIGKILL)


def _run(_rank: int, config: Config) -> None:
    run_once(config, Console(quiet=True), "unbroken")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_a_killed_worker_is_named_and_a_restarted_run_ends_the_same(tmp_path: Path, corpus_files: str) -> None:
    config = write_config(tmp_path, corpus_files)
    run_dir = tmp_path / "run"
    launcher = Launcher(config, run_dir, 2, "--max-restarts", "1")
    kill_after(2, launcher, run_dir, 0)
    kill_after(6, launcher, run_dir, -1)
    assert launcher.wait(60) == 1
    (line,) = launcher.lines()
    assert line.startswith("overcoat: rank 1 was killed by SIGKILL")
    # They were started anew once, from the newest checkpoint; the end is bit for bit that of an unbroken run.
    resumed = [json.loads(row)["step"] for row in (run_dir / "metrics.jsonl").open() if "resume" in row]
    assert len(resumed) == 1
    assert resumed[0] in (2, 4)
    for folder in (run_dir, tmp_path / "reference"):
        on_two(_run, "cpu", load_config(config, [f"train.run_dir={folder}"]))
    assert losses(run_dir) == losses(tmp_path / "reference")


def test_what_follows_from_another_is_not_said_once_the_launcher_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM may come while a step still waits for the process that is gone, and its error after it."""
    monkeypatch.setattr(process._Groups, "is_ended", False)
    monkeypatch.setattr(process, "SECONDS_FOR_THE_CAUSE", 0.0)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert process.may_report("closed by peer", is_cause=False)
    with process.StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
    assert not process.may_report("closed by peer", is_cause=False)
    assert process.may_report("no such file")


def test_what_is_wrong_with_the_configuration_is_said_once(tmp_path: Path, corpus_files: str) -> None:
    launcher = Launcher(write_config(tmp_path, corpus_files, "train.accumulation=3"), tmp_path / "run", 2)
    assert launcher.wait(60) == 2
    (line,) = launcher.lines()
    assert "a step of 3 rows" in line
    assert not (tmp_path / "run/checkpoints").exists()


def test_the_cause_is_the_failure_that_others_follow_from(tmp_path: Path) -> None:
    def failed(rank: int, status: int) -> ProcessFailure:
        return ProcessFailure(local_rank=rank, pid=rank, exitcode=status, error_file=str(tmp_path / f"{rank}.json"))

    said = {"message": {"message": "why", "extraInfo": {"timestamp": "2000000000"}}}
    (tmp_path / "2.json").write_text(json.dumps(said))
    ended, killed, spoke = failed(0, -signal.SIGTERM), failed(1, -signal.SIGKILL), failed(2, 2)
    assert _cause({0: ended, 1: killed}) == (1, killed)
    assert _explain(1, killed)[1].startswith("rank 1 was killed by SIGKILL")
    assert _cause({0: ended, 1: killed, 2: spoke}) == (2, spoke)
    assert _explain(2, spoke) == (2, "")


@pytest.mark.parametrize(
    ("end", "status"),
    [(None, 0), (SignalException("", signal.SIGTERM), 128 + signal.SIGTERM), (RESTART, 0), (3, 3)],
)
def test_the_status_is_that_of_the_workers(end: Any, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that were started last: where memory ran out all are started again."""
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=end, error_file="") if isinstance(end, int) else None
    ends = [ChildFailedError("", {1: failure}) if failure else end, None]

    def run(options: Any) -> None:
        assert (options.nproc_per_node, options.max_restarts) == ("2", 3)
        if error := ends.pop(0):
            raise error

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(logging, "disable", lambda _: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch(2, 3, "cpu", ["tiny.toml"]) == (status, "")
    assert len(ends) == (end != RESTART)
