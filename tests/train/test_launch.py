"""`overcoat train --gpus N`: real launches on the CPU, and workers that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from overcoat.train import process
from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.configfile import build_config, dump_toml
from overcoat.train.launch import _cause, _explain
from tests.train.conftest import TINY
from tests.train.runs import losses

ROOT = Path(__file__).parents[2]


def write_config(folder: Path, corpus_files: str, *words: str) -> Path:
    places = [f"data.files={corpus_files}", f"data.cache_dir={folder / 'data'}"]
    sizes = ["train.batch_size=1", "train.accumulation=12", "train.steps=8", "checkpoint.every=2", "checkpoint.keep=9"]
    path = folder / "tiny.toml"
    path.write_text(dump_toml(build_config(TINY, [*places, *sizes, *words])))
    return path


def start(config: Path, run_dir: Path, gpus: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "overcoat", "train", str(config), f"train.run_dir={run_dir}", *options]
    command += ["--gpus", str(gpus)] if gpus > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)


def wait(launcher: subprocess.Popen[str], seconds: float) -> str:
    """What it said on stderr; it ends with whoever waits no longer."""
    try:
        return launcher.communicate(timeout=seconds)[1]
    except BaseException:
        for pid in [*workers_of(launcher), launcher.pid]:
            os.kill(pid, signal.SIGKILL)
        raise


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


def wait_for(path: Path, launcher: subprocess.Popen[str]) -> None:
    while not path.exists() and launcher.poll() is None:
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_a_killed_worker_is_named_and_a_restarted_run_ends_the_same(tmp_path: Path, corpus_files: str) -> None:
    config = write_config(tmp_path, corpus_files)
    run_dir = tmp_path / "run"
    launcher = start(config, run_dir, 2)
    wait_for(run_dir / "checkpoints/step-00000002", launcher)
    begun = time.monotonic()
    os.kill(workers_of(launcher)[-1], signal.SIGKILL)
    said = wait(launcher, 60)
    assert launcher.returncode == 1
    lines = [line for line in said.splitlines() if line.startswith("overcoat:")]
    assert len(lines) == 1
    assert lines[0].startswith("overcoat: rank 1 was killed by SIGKILL")
    assert time.monotonic() - begun < 60
    # Killed again, the launcher begins again by itself, and ends bit for bit as an unbroken run does.
    launcher = start(config, run_dir, 2, "--max-restarts", "1")
    wait_for(run_dir / "checkpoints/step-00000006", launcher)
    os.kill(workers_of(launcher)[0], signal.SIGKILL)
    said = wait(launcher, 120)
    assert launcher.returncode == 0, said
    reference = start(config, tmp_path / "reference", 2)
    wait(reference, 120)
    assert reference.returncode == 0
    assert losses(run_dir) == losses(tmp_path / "reference")


def test_what_follows_from_another_is_not_said_once_the_launcher_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM may come while a step still waits for the process that is gone, and its error after it."""
    monkeypatch.setattr(process._Together, "is_ended", False)
    monkeypatch.setattr(process, "SECONDS_FOR_THE_CAUSE", 0.0)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert process.may_report("closed by peer", is_cause=False)
    with process.StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
    assert not process.may_report("closed by peer", is_cause=False)
    assert process.may_report("no such file")


def test_what_is_wrong_with_the_configuration_is_said_once(tmp_path: Path, corpus_files: str) -> None:
    launcher = start(write_config(tmp_path, corpus_files, "train.accumulation=3"), tmp_path / "run", 2)
    said = wait(launcher, 60)
    assert launcher.returncode == 2
    lines = [line for line in said.splitlines() if line.startswith("overcoat:")]
    assert len(lines) == 1
    assert "a step of 3 rows" in lines[0]
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


@pytest.mark.nightly
def test_killed_at_random_moments_and_resumed_on_any_number(tmp_path: Path, corpus_files: str) -> None:
    # The order of sums is all that differs with their number. In FP8 it turns scales: unbroken runs of one and two are
    # 7e-3 apart at this rate. In FP32 it stays what it is.
    words = ["recipe.name=bf16", "model.dtype=float32", "optimizer.moments=fp32", "train.steps=24"]
    config = write_config(tmp_path, corpus_files, *words, "checkpoint.every=1")
    assert start(config, tmp_path / "reference", 2).wait(timeout=300) == 0
    generator, run_dir = random.Random(0), tmp_path / "run"
    for many in (2, 4, 3, 2):
        before = len(list_checkpoints(run_dir / "checkpoints"))
        launcher = start(config, run_dir, many)
        while launcher.poll() is None and len(list_checkpoints(run_dir / "checkpoints")) <= before:
            time.sleep(0.05)
        time.sleep(generator.random())
        if launcher.poll() is None:
            os.kill(generator.choice(workers_of(launcher)), signal.SIGKILL)
        wait(launcher, 60)
    assert start(config, run_dir, 1).wait(timeout=300) == 0
    mine, theirs = losses(run_dir), losses(tmp_path / "reference")
    for kind in ("train", "eval"):
        assert mine[kind].keys() == theirs[kind].keys()
        for step, values in mine[kind].items():
            assert values[0] == pytest.approx(theirs[kind][step][0], rel=1e-5), (kind, step)
