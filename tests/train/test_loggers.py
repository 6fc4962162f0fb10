"""W&B and MLflow, the real libraries without a network: the figures of a run, and one run after a resumption."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from overcoat.train import loggers
from overcoat.train.config import Config
from overcoat.train.metrics import RunLog
from tests.train.runs import CPU, MakeConfig, row, text_of


def logged(config: Config, console: Console, first: int, *steps: int) -> None:
    Path(config.train.run_dir).mkdir(exist_ok=True)
    log = RunLog(config, console, "run", first, CPU)
    for step in steps:
        log.write(row(step, loss=10.0 - step), {"kind": "fp8", "step": step, "ranges": {}})
    log.close()


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
            logged(config, console, 0)

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
