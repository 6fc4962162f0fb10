"""metrics.jsonl as a killed process leaves it, TensorBoard, peaks of memory, and what is said meanwhile."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from overcoat import memory
from overcoat.memory import peak_bytes
from overcoat.train import loggers
from overcoat.train.config import Config
from overcoat.train.metrics import RunLog, check_finite, read_metrics, running_mean
from overcoat.train.run import run
from tests.train.runs import CPU, MakeConfig, row, text_of

GPU = torch.device("cuda", 0)
Open = Callable[..., RunLog]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run/metrics.jsonl"


@pytest.fixture
def open_log(make_config: MakeConfig, console: Console, path: Path) -> Open:
    """The log of a run that begins with a step."""
    return lambda step=0, *words, at=console: RunLog(make_config(*words), at, "[bold] run", step, CPU)


def read(path: Path, *lines: object) -> dict[str, Any]:
    """What `read_metrics` makes of these lines, rows or raw text."""
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return read_metrics(path)


# ---- the file -------------------------------------------------------------------------------------------------------


def test_what_a_dead_process_logged_after_its_checkpoint_is_forgotten(path: Path, open_log: Open) -> None:
    log = open_log()
    assert path.read_text() == ""  # a first start is no resumption
    log.write(row(1), row(2), {"kind": "eval", "step": 2, "loss": 5.0}, row(3, loss=9.0))
    before = path.read_text()
    assert json.loads(before.splitlines()[0]) == row(1)  # on the disk at once: whoever is killed now has logged it
    log.close()
    open_log(2).close()
    assert path.read_text() == before + '{"kind": "resume", "step": 2}\n'  # no empty line where none was cut off
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # killed while writing
    log = open_log(2)
    log.write(row(3, loss=3.0))
    log.close()
    found = read_metrics(path)
    assert {step: r["loss"] for step, r in found["train"].items()} == {1: 1.0, 2: 1.0, 3: 3.0}
    assert found["eval"][2]["loss"] == 5.0


@pytest.mark.parametrize("torn", ['{"kind": "train", "step": 2, "loss": 1.', "\x00\x00\x00", '{"k": "\udcff', ""])
def test_a_line_cut_off_is_skipped_wherever_it_is(path: Path, torn: str) -> None:
    assert not any(read(path, "").values())
    lines = [json.dumps(row(1)), torn, '{"kind": "resume", "step": 1}', json.dumps(row(2, loss=3.0)), torn]
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    assert {step: r["loss"] for step, r in read_metrics(path)["train"].items()} == {1: 1.0, 2: 3.0}


@pytest.mark.parametrize(
    "line",
    ['{"kind": "lost", "step": 2}', '{"step": 2}', '{"kind": "eval", "step": 2}', '{"kind": "resume"}', "[1]", "5"],
)
def test_a_row_of_another_kind_is_refused_with_its_place(path: Path, line: str) -> None:
    expected = rf"m\w+\.jsonl, line 2: not a row that overcoat wrote: '{re.escape(line)}'; remove"
    with pytest.raises(ValueError, match=expected):
        read(path, row(1), f"{line}\n")


def test_resuming_forgets_later_rows_but_not_fits(path: Path) -> None:
    plan = {"kind": "fit", "step": 3, "micro_batch": 1, "block_checkpoints": False}
    rows = [*map(row, (1, 2, 3, 4)), {"kind": "eval", "step": 3, "loss": 5.0}, plan]
    found = read(path, *rows, {"kind": "resume", "step": 2})
    assert list(found["train"]) == [1, 2]  # the step of the checkpoint itself has been taken
    assert (found["eval"], found["fit"]) == ({}, {3: plan})
    again = read(path, *rows, {"kind": "resume", "step": 3}, {"kind": "resume", "step": 0})
    assert again["train"] == {}  # back to the beginning


# ---- losses and gradients that are not finite -----------------------------------------------------------------------


def test_a_skipped_step_is_marked_and_a_lost_loss_ends_the_run() -> None:
    rows = [row(1), row(2, norm=float("inf")), row(3)]
    check_finite(rows)
    assert [r["gradient_norm"] for r in rows] == [1.0, None, 1.0]
    with pytest.raises(FloatingPointError, match="step 5: the loss is nan"):
        check_finite([row(4), row(5, loss=float("nan")), row(6, loss=float("nan"))])


def test_ten_skipped_steps_in_a_row_end_the_run_however_they_are_reported() -> None:
    for size in (1, 4, 9):
        skipped = 0
        for start in range(1, 10, size):
            bad = [row(step, norm=float("inf")) for step in range(start, min(10, start + size))]
            skipped = check_finite(bad, skipped)
        assert skipped == 9
        assert check_finite([row(10), row(11, norm=float("nan"))], skipped) == 1
        with pytest.raises(FloatingPointError, match="step 10: the gradients of 10 steps in a row were not finite"):
            check_finite([row(10, norm=float("nan")), row(11)], skipped)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_the_peak_of_a_run_survives_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report starts PyTorch's counter anew; the run's own figure must not fall."""
    counter = {"peak": 70}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: counter["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: counter.update(peak=10))
    monkeypatch.setattr(memory, "_earlier_peak", 0)
    own = torch.device("cuda")  # parameters made there lie on cuda:0
    assert (memory.restart_peak(GPU), peak_bytes(own)) == (70, 70)
    counter["peak"] = 50
    assert (memory.restart_peak(GPU), peak_bytes(own)) == (50, 70)
    counter["peak"] = 90
    assert peak_bytes(own) == 90
    memory.forget_peak(own)
    assert peak_bytes(own) == 10


# ---- TensorBoard, W&B and MLflow without a network: the figures of a run, and one run after a resumption -----------


def logged(config: Config, console: Console, first: int, *steps: int) -> None:
    Path(config.train.run_dir).mkdir(exist_ok=True)
    log = RunLog(config, console, "run", first, CPU)
    for step in steps:
        log.write(row(step, loss=10.0 - step), {"kind": "fp8", "step": step, "ranges": {}})
    log.close()


def test_tensorboard_shows_every_step_once_after_a_resume(
    make_config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = make_config("train.tensorboard=true")
    logged(config, console, 0, 1, 2, 3)
    logged(config, console, 2, 3, 4)
    found = events.EventAccumulator(str(tmp_path / "run/tensorboard"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("train/loss")] == [(1, 9), (2, 8), (3, 7), (4, 6)]


def test_mlflow_has_the_figures_and_one_run(make_config: MakeConfig, console: Console, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    config = make_config("train.loggers=mlflow")
    logged(config, console, 0, 1, 2)
    logged(config, console, 2, 3)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "run/mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("overcoat").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(1, 9.0), (2, 8.0), (3, 7.0)]
    assert run.data.params["optimizer.lr"] == "0.003"
    assert run.info.status == "KILLED"  # before train.steps


def test_training_does_not_wait_for_mlflow(
    make_config: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor its end for figures that wait behind one that was refused."""
    mlflow, gates, sent = pytest.importorskip("mlflow"), (threading.Event(), threading.Event()), []

    def log_batch(self: object, run: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        if params:
            return
        assert gates[metrics[0].step > 3].wait(20)
        sent.append(metrics[0].step)
        if len(sent) == 3:
            raise RuntimeError("no route to host")

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    config = make_config("train.loggers=mlflow")
    Path(config.train.run_dir).mkdir()
    log = RunLog(config, console, "run", 0, CPU)
    sender = log._loggers["mlflow"].sender
    for step in (1, 2, 3, 4, 5):
        log.write(row(step, loss=1.0))
    assert sent == []
    gates[0].set()
    log.close()
    gates[1].set()
    sender.shutdown()
    assert sent[:3] == [1, 2, 3]
    assert 5 not in sent
    assert "mlflow gets no more figures of this run (no route to host)" in text_of(console)


def test_wandb_writes_offline(
    make_config: MakeConfig, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = make_config("train.loggers=wandb")
    logged(config, console, 0, 1, 2)
    first = json.loads((tmp_path / "run/loggers.json").read_text())["wandb"]
    logged(config, console, 2, 3)
    assert json.loads((tmp_path / "run/loggers.json").read_text())["wandb"] == first
    written = b"".join(path.read_bytes() for path in (tmp_path / "run/wandb").rglob(f"*{first}.wandb"))
    assert b"train/tokens_per_second" in written
    assert text_of(console) == ""


def test_a_library_that_is_missing_or_fails_is_one_line(
    make_config: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("train.loggers=wandb")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        with pytest.raises(ValueError, match=r"train\.loggers = wandb needs the package 'wandb': pip install"):
            run(config, console)
        assert not Path(config.train.run_dir).exists()  # refused before any token was made

    class Away:
        def __init__(self, *_: object) -> None:
            self.left = 1

        def write(self, *_: object) -> None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("no route to host")

        close = write

    monkeypatch.setitem(loggers.LOGGERS, "wandb", Away)
    logged(config, console, 0, 1, 2, 3)
    logged(config, console, 3, 4)  # away when the run ends
    said = "wandb gets no more figures of this run (no route to host); metrics.jsonl has all of them\n"
    assert text_of(console) == 2 * said
    assert len((Path(config.train.run_dir) / "metrics.jsonl").read_text().splitlines()) == 9


def test_a_running_mean_forgets_what_has_left_it() -> None:
    """A difference of sums would not: one spike, or NaN, would stay in all that follows."""
    assert running_mean([1.0, 1e20, 2.0, 3.0, 5.0], 2) == [1.0, 5e19, 5e19, 2.5, 4.0]
