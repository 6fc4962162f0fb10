"""Resuming: a run continues with the very numbers of a run that was never stopped (tests/attack/kills.py: killed)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from overcoat.train import loop, run
from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.config import Config
from overcoat.train.files import DamagedError, verify_directory
from overcoat.train.loop import RunStoppedError
from overcoat.train.metrics import read_metrics
from overcoat.train.run import run_once

MakeConfig = Callable[..., Config]


def losses(run_dir: Path) -> dict[str, dict[int, tuple[float, ...]]]:
    """Everything numerical that a run logged: {"train": {step: (loss, lr, norm)}, "eval": {step: (loss,)}}."""
    metrics = read_metrics(run_dir / "metrics.jsonl")
    names = ("loss", "lr", "gradient_norm")
    return {
        kind: {s: tuple(row[n] for n in names if n in row) for s, row in rows.items()} for kind, rows in metrics.items()
    }


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "export" / "model.safetensors")


def assert_same_run(run_dir: Path, reference: Path) -> None:
    assert losses(run_dir) == losses(reference)
    expected = weights(reference)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(run_dir).items())
    newest = [torch.load(list_checkpoints(r / "checkpoints")[-1] / "training.pt") for r in (run_dir, reference)]
    states = [saved["optimizer"]["state"] for saved in newest]
    for index, state in states[1].items():
        assert all(torch.equal(tensor, states[0][index][name]) for name, tensor in state.items())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, corpus_files: str) -> tuple[Config, Path]:
    """The configuration of all runs here, with tokens made once, and the directory of the uninterrupted run."""
    from overcoat.train.configfile import build_config
    from tests.train.conftest import TINY

    folder = tmp_path_factory.mktemp("resume")
    config = build_config(
        TINY,
        [f"data.files={corpus_files}", f"train.run_dir={folder / 'reference'}", f"data.cache_dir={folder / 'data'}"],
    )
    torch.set_num_threads(1)
    run_once(config, Console(quiet=True), "reference")
    return config, folder / "reference"


@pytest.fixture
def resumed(prepared: tuple[Config, Path], tmp_path: Path, console: Console) -> Callable[..., Any]:
    """`resumed("key=value", ...)`: run the prepared configuration in `tmp_path / "run"` (again)."""
    from overcoat.train.configfile import build_config

    def start(*arguments: str) -> Any:
        values = json.loads(json.dumps(__import__("dataclasses").asdict(prepared[0])))
        return run_once(build_config(values, [f"train.run_dir={tmp_path / 'run'}", *arguments]), console, "run")

    return start


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM during optimizer step `step`, in this process."""
    real = loop.train_step

    def stepping(state: Any, config: Config) -> Any:
        if state.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(state, config)

    monkeypatch.setattr(loop, "train_step", stepping)


@pytest.fixture
def stopped(resumed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run that SIGTERM stopped at step 7: checkpoints 6 and 7."""
    with monkeypatch.context() as patch:
        stop_at(7, patch)
        with pytest.raises(RunStoppedError):
            resumed()
    found = list_checkpoints(tmp_path / "run/checkpoints")
    assert [path.name for path in found] == ["step-00000006", "step-00000007"]
    return tmp_path / "run"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_stopped_run_continues(stopped: Path, resumed: Callable[..., Any], prepared: tuple[Config, Path]) -> None:
    resumed("checkpoint.keep=1", "eval.every=6")  # keys that decide nothing may differ
    assert_same_run(stopped, prepared[1])
    assert [path.name for path in list_checkpoints(stopped / "checkpoints")] == ["step-00000012"]


def test_a_finished_run_is_only_summarized(prepared: tuple[Config, Path], console: Console) -> None:
    config, reference = prepared
    before = losses(reference)
    checkpoint = (list_checkpoints(reference / "checkpoints")[-1] / "manifest.json").read_bytes()
    run_once(config, console, "again")
    assert losses(reference) == before
    assert (list_checkpoints(reference / "checkpoints")[-1] / "manifest.json").read_bytes() == checkpoint


def test_the_evaluation_of_the_step_that_was_stopped_is_made_on_resuming(
    resumed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("train.steps=4", "eval.every=1")
    resumed(*short, f"train.run_dir={tmp_path / 'whole'}")
    for step in (2, 4):
        with monkeypatch.context() as patch:
            stop_at(step, patch)
            with pytest.raises(RunStoppedError):
                resumed(*short)
        assert list(losses(tmp_path / "run")["eval"]) == list(range(1, step))  # who stops it may not wait
    resumed(*short)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_checkpoint_is_chosen_under_the_lock(
    stopped: Path, resumed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that held it may have removed what was the newest."""

    @contextlib.contextmanager
    def locked(run_dir: Path) -> Iterator[None]:
        shutil.rmtree(run_dir / "checkpoints/step-00000007")
        yield

    monkeypatch.setattr(run, "locked", locked)
    resumed()
    assert '{"kind": "resume", "step": 6}' in (stopped / "metrics.jsonl").read_text()


def test_a_checkpoint_with_nothing_left_to_train_is_refused(stopped: Path, resumed: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"step-00000007 is at step 7 of train\.steps = 7: nothing is left, raise"):
        resumed(f"train.resume={stopped}/checkpoints/step-00000007", f"train.run_dir={stopped}/2", "train.steps=7")


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_an_error_that_writes_nothing(
    stopped: Path, resumed: Callable[..., Any], prepared: tuple[Config, Path], name: str
) -> None:
    newest = stopped / "checkpoints/step-00000007" / name
    newest.write_bytes(newest.read_bytes()[:-10])
    before = snapshot(stopped)
    with pytest.raises(DamagedError, match=rf"step-00000007 is damaged.*{name}.*train.resume=.*step-00000006"):
        resumed()
    assert snapshot(stopped) == before
    resumed(f"train.resume={stopped}/checkpoints/step-00000006")  # what the message says
    assert_same_run(stopped, prepared[1])
    assert (stopped / "checkpoints/abandoned-1-step-00000007" / name).exists()


def test_a_missing_checkpoint_is_an_error_that_writes_nothing(stopped: Path, resumed: Callable[..., Any]) -> None:
    before = snapshot(stopped)
    with pytest.raises(ValueError, match=r"no such checkpoint .*step-00000006, .*step-00000007"):
        resumed(f"train.resume={stopped}/checkpoints/step-00000009")
    assert snapshot(stopped) == before


def test_another_configuration_is_an_error_that_writes_nothing(stopped: Path, resumed: Callable[..., Any]) -> None:
    before = snapshot(stopped)
    with pytest.raises(ValueError, match=r"optimizer.lr: 0.003 -> 0.5"):
        resumed("optimizer.lr=0.5")
    assert snapshot(stopped) == before


def test_a_folder_with_other_files_is_an_error_that_writes_nothing(tmp_path: Path, resumed: Callable[..., Any]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds files but no run of overcoat"):
        resumed()
    assert snapshot(tmp_path / "run") == {"thesis.txt": b"years of work"}


def test_explicit_resume_branches_into_another_run(stopped: Path, resumed: Callable[..., Any], tmp_path: Path) -> None:
    before = snapshot(stopped)
    result = resumed(
        f"train.resume={stopped}/checkpoints/step-00000006", f"train.run_dir={tmp_path / 'branch'}", "train.steps=8",
        "optimizer.weight_decay=0.5",
    )  # fmt: skip
    assert result.steps == 8
    assert list(losses(tmp_path / "branch")["train"]) == [7, 8]
    saved = torch.load(tmp_path / "branch/checkpoints/step-00000008/training.pt")
    assert saved["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    assert snapshot(stopped) == before


def test_other_data_are_refused(stopped: Path, resumed: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("alpha beta gamma\n" * 20_000)
    with pytest.raises(ValueError, match="trained on other tokens"):
        resumed(
            f"train.resume={stopped}/checkpoints/step-00000006", f"train.run_dir={tmp_path / 'branch'}",
            f"data.files={tmp_path}/other.txt", f"data.cache_dir={tmp_path}/data",
        )  # fmt: skip


def test_a_checkpoint_of_another_model_is_refused(stopped: Path, resumed: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds another model"):
        resumed(
            f"train.resume={stopped}/checkpoints/step-00000006", f"train.run_dir={tmp_path / 'branch'}",
            "model.config.num_hidden_layers=3",
        )  # fmt: skip


def test_two_processes_cannot_share_a_run(resumed: Callable[..., Any], tmp_path: Path) -> None:

    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"), pytest.raises(ValueError, match="another process is training"):
        resumed()


def test_streamed_data_resume_too(resumed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ["data.streaming=true", "data.shuffle_rows=8", "data.held_out=0.3", f"data.cache_dir={tmp_path / 'data'}"]
    resumed(*stream, f"train.run_dir={tmp_path / 'whole'}")
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        with pytest.raises(RunStoppedError):
            resumed(*stream)
    resumed(*stream)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("optimizer", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("master", ["bf16", "bf16+16"])
def test_every_kind_of_state_resumes(
    resumed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, master: str
) -> None:
    options = [
        f"optimizer.moments={optimizer}",
        f"optimizer.master={master}",
        "train.steps=4",
        "data.document_mask=true",
    ]
    resumed(*options, f"train.run_dir={tmp_path / 'whole'}")
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        with pytest.raises(RunStoppedError):
            resumed(*options)
    resumed(*options)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_only_the_newest_are_kept_and_all_are_valid(prepared: tuple[Config, Path]) -> None:
    found = list_checkpoints(prepared[1] / "checkpoints")
    assert [path.name for path in found] == ["step-00000009", "step-00000012"]
    assert [verify_directory(path)["step"] for path in found] == [9, 12]


def test_the_recorded_run_can_be_moved(stopped: Path, resumed: Callable[..., Any], tmp_path: Path) -> None:
    shutil.move(stopped, tmp_path / "moved")
    resumed(f"train.run_dir={tmp_path / 'moved'}")
    assert list(losses(tmp_path / "moved")["train"]) == list(range(1, 13))


def test_a_stream_of_changed_files_is_refused(
    resumed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 30)
    stream = ["data.streaming=true", "data.shuffle_rows=8", "data.held_out=0.3", f"data.files={tmp_path}/*.txt"]
    with monkeypatch.context() as patch:
        stop_at(3, patch)
        with pytest.raises(RunStoppedError):
            resumed(*stream)
    with (tmp_path / "7.txt").open("a") as file:
        file.write("more")
    with pytest.raises(ValueError, match=r"trained on other tokens.*stream the same files"):
        resumed(*stream)
