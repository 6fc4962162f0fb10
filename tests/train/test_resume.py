"""Resuming: a run continues with the very numbers of a run that was never stopped (tests/attack/kills.py: killed)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from overcoat.train import run
from overcoat.train.config import Config
from overcoat.train.configfile import build_config
from overcoat.train.files import lock
from overcoat.train.loop import RunStoppedError
from overcoat.train.run import run_once
from tests.train.conftest import TINY
from tests.train.runs import OLMOE, assert_same_run, losses, names, stop_at

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, corpus_files: str) -> tuple[Config, Path]:
    """The configuration of all runs here, with tokens made once, and the directory of the uninterrupted run."""
    folder = tmp_path_factory.mktemp("resume")
    places = [f"train.run_dir={folder / 'reference'}", f"data.cache_dir={folder / 'data'}"]
    config = build_config(TINY, [f"data.files={corpus_files}", *places])
    torch.set_num_threads(1)
    run_once(config, Console(quiet=True), "reference")
    return config, folder / "reference"


@pytest.fixture
def resumed(prepared: tuple[Config, Path], tmp_path: Path, console: Console) -> Run:
    """`resumed("key=value", ...)`: run the prepared configuration in `tmp_path / "run"` (again)."""
    values = asdict(prepared[0])
    return lambda *words: run_once(build_config(values, [f"train.run_dir={tmp_path / 'run'}", *words]), console, "run")


@pytest.fixture
def stopped_at(resumed: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`stopped_at(step, "key=value", ...)`: the same, stopped by SIGTERM in a step."""

    def start(step: int, *words: str) -> None:
        with monkeypatch.context() as patch:
            stop_at(step, patch)
            with pytest.raises(RunStoppedError):
                resumed(*words)

    return start


@pytest.fixture(scope="module")
def stopped_once(prepared: tuple[Config, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    config = build_config(asdict(prepared[0]), [f"train.run_dir={run_dir}"])
    with pytest.MonkeyPatch.context() as patch:
        stop_at(7, patch)
        with pytest.raises(RunStoppedError):
            run_once(config, Console(quiet=True), "run")
    assert names(run_dir / "checkpoints") == ["step-00000006", "step-00000007"]
    return run_dir


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """The directory of a run that SIGTERM stopped at step 7: checkpoints 6 and 7."""
    return Path(shutil.copytree(stopped_once, tmp_path / "run"))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_stopped_run_continues(stopped: Path, resumed: Run, prepared: tuple[Config, Path]) -> None:
    resumed("checkpoint.keep=1", "eval.every=6")  # keys that decide nothing may differ
    assert_same_run(stopped, prepared[1])
    assert names(stopped / "checkpoints") == ["step-00000012"]


def test_a_run_of_muon_continues(resumed: Run, stopped_at: Run, tmp_path: Path) -> None:
    words = ("optimizer.name=muon", "optimizer.scale=spectral", "optimizer.lr=0.02", "optimizer.adamw_lr=1e-3",
             "train.steps=5")  # fmt: skip
    resumed(*words, f"train.run_dir={tmp_path / 'whole'}")
    stopped_at(3, *words)
    resumed(*words, "optimizer.offload=true")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_the_evaluation_of_the_step_that_was_stopped_is_made_on_resuming(
    resumed: Run, stopped_at: Run, tmp_path: Path
) -> None:
    short = ("train.steps=4", "eval.every=1")
    resumed(*short, f"train.run_dir={tmp_path / 'whole'}")
    for step in (2, 4):
        stopped_at(step, *short)
        assert list(losses(tmp_path / "run")["eval"]) == list(range(1, step))  # who stops it may not wait
    resumed(*short)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_checkpoint_is_chosen_under_the_lock(stopped: Path, resumed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that held it may have removed what was the newest."""

    @contextlib.contextmanager
    def held(path: Path, _busy: object) -> Iterator[None]:
        shutil.rmtree(path.parent / "checkpoints/step-00000007")
        yield

    monkeypatch.setattr(run, "lock", held)
    resumed()
    assert '{"kind": "resume", "step": 6}' in (stopped / "metrics.jsonl").read_text()


def test_two_processes_cannot_share_a_run(resumed: Run, tmp_path: Path) -> None:
    with (
        lock(tmp_path / "run/.lock", lambda: None),
        pytest.raises(ValueError, match=r"another process is training in .*run: choose another train\.run_dir"),
    ):
        resumed()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.resume=STOPPED/checkpoints/step-00000009"], r"no such checkpoint .*step-00000006, .*step-00000007"),
        (["optimizer.lr=0.5"], r"optimizer.lr: 0.003 -> 0.5"),
        (
            ["train.resume=STOPPED/checkpoints/step-00000007", "train.run_dir=TMP/2", "train.steps=7"],
            r"step-00000007 is at step 7 of train\.steps = 7: nothing is left, raise",
        ),
        (
            ["train.resume=STOPPED/checkpoints/step-00000006", "train.run_dir=TMP/2", "data.files=TMP/other.txt",
             "data.cache_dir=TMP/data"],
            "trained on other tokens",
        ),
        (
            ["train.resume=STOPPED/checkpoints/step-00000006", "train.run_dir=TMP/2",
             "model.config.num_hidden_layers=3"],
            "holds another model",
        ),
        (["train.run_dir=TMP"], "holds files but no run of overcoat"),
        (
            ["model.config={}", "model.name=STOPPED/checkpoints/step-00000006", "train.run_dir=TMP/2"],
            r"model\.name = .*step-00000006' is a checkpoint: name its run's export/",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_resumed_is_an_error_that_changes_nothing(
    stopped: Path, resumed: Run, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "other.txt").write_text("alpha beta gamma\n" * 20_000)
    before = snapshot(stopped)
    with pytest.raises(ValueError, match=message):
        resumed(*(word.replace("STOPPED", str(stopped)).replace("TMP", str(tmp_path)) for word in words))
    assert snapshot(stopped) == before


@pytest.mark.parametrize(
    ("optimizer", "master", "words"),
    [
        ("fp8", "bf16", ()),
        ("8bit", "auto", OLMOE),
        pytest.param("bf16", "bf16+16", (), marks=pytest.mark.nightly),
        pytest.param("fp32", "bf16", (), marks=pytest.mark.nightly),
    ],
)
def test_every_kind_of_state_resumes(
    resumed: Run, stopped_at: Run, tmp_path: Path, optimizer: str, master: str, words: tuple[str, ...]
) -> None:
    options = (f"optimizer.moments={optimizer}", f"optimizer.master={master}", *words)
    options += ("train.steps=4", "data.document_mask=true")
    resumed(*options, f"train.run_dir={tmp_path / 'whole'}")
    stopped_at(2, *options)
    resumed(*options)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_streamed_layers_resume_and_are_those_of_released_gradients(
    resumed: Run, stopped_at: Run, tmp_path: Path
) -> None:
    options = ("optimizer.clip=0", "recipe.name=leanest")
    resumed(*options, "optimizer.release_gradients=true", f"train.run_dir={tmp_path / 'whole'}")
    stopped_at(7, *options, "train.stream=true")
    resumed(*options, "train.stream=true")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_streamed_layers_accumulate(resumed: Run, stopped_at: Run, tmp_path: Path) -> None:
    options = ("optimizer.clip=0", "train.stream=true", "train.accumulation=2", "train.resident=1")
    resumed(*options, f"train.run_dir={tmp_path / 'whole'}")
    stopped_at(7, *options)
    resumed(*options)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_streamed_data_resume_too_and_changed_files_are_refused(resumed: Run, stopped_at: Run, tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 30)
    stream = ["data.streaming=true", "data.shuffle_rows=8", "data.held_out=0.3", f"data.files={tmp_path}/*.txt"]
    stream += [f"data.cache_dir={tmp_path / 'data'}", "train.steps=6"]
    resumed(*stream, f"train.run_dir={tmp_path / 'whole'}")
    stopped_at(4, *stream)
    text = (tmp_path / "7.txt").read_text()
    (tmp_path / "7.txt").write_text(text + "more")
    with pytest.raises(ValueError, match=r"trained on other tokens.*stream the same files"):
        resumed(*stream)
    (tmp_path / "7.txt").write_text(text)
    resumed(*stream)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
