"""Loggers besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, by `train.loggers`.

Each uses its library's writer, configured by environment variables: WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, ...
RUN_DIR/loggers.json stores the run's id, so a resumed run continues it. accelerate's trackers wrap the same
writers, but make a PartialState (a device and a process group of its own), and MLflow's waits for its server each time.
"""

from __future__ import annotations

import json
import math
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overcoat.extras import load_extra, reason
from overcoat.train.config import Config

PROJECT = "overcoat"
KNOWN = "loggers.json"
MOST_PARAMETERS = 100  # of an MLflow run, in one request


class TensorBoard:
    """Events in RUN_DIR/tensorboard. `write` takes the figures of one step under names such as "train/loss"; `close`
    takes whether the run has ended. library: arguments of `load_extra`."""

    library = ("torch.utils.tensorboard", "hf", "train.tensorboard = true")

    def __init__(self, config: Config, title: str, first_step: int) -> None:
        board = load_extra(*self.library)
        # TensorBoard hides what an earlier process wrote from this step on.
        self.writer = board.SummaryWriter(Path(config.train.run_dir) / "tensorboard", purge_step=first_step + 1)

    def write(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self, is_done: bool) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases, whose figures have the training's step as their x."""

    library = ("wandb", "loggers", "train.loggers = wandb")

    def __init__(self, config: Config, title: str, first_step: int) -> None:
        wandb = load_extra(*self.library)
        known = _known(config)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=f"{Path(config.train.run_dir).name}: {title}",
            dir=config.train.run_dir,
            id=known.get("wandb"),
            resume="allow" if "wandb" in known else None,
            config=asdict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self.run.define_metric("*", step_metric="step")
        _remember(config, "wandb", self.run.id)

    def write(self, figures: dict[str, float], step: int) -> None:
        self.run.log({**figures, "step": step})

    def close(self, is_done: bool) -> None:
        self.run.finish(exit_code=0 if is_done else 1)


class MLflow:
    """A run of MLflow, in RUN_DIR/mlruns unless MLFLOW_TRACKING_URI says otherwise. A thread sends the figures:
    training would wait for a slow server, and 4 minutes for one that is away."""

    library = ("mlflow", "loggers", "train.loggers = mlflow")

    def __init__(self, config: Config, title: str, first_step: int) -> None:
        mlflow = load_extra(*self.library)
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            place = (Path(config.train.run_dir) / "mlruns").resolve().as_uri()
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # 14 s; of 7, the last one waits 2 minutes
        self.metric = mlflow.entities.Metric
        self.sender, self.sent = ThreadPoolExecutor(1), list[Future[Any]]()
        self.client, known = mlflow.MlflowClient(tracking_uri=place), _known(config)
        self.run_id = known.get("mlflow", "")
        if not self.run_id:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self.client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self.client.create_experiment(name)
            run = self.client.create_run(experiment, run_name=f"{Path(config.train.run_dir).name}: {title}")
            self.run_id = run.info.run_id
            flat = [(f"{part}.{key}", v) for part, values in asdict(config).items() for key, v in values.items()]
            params = [mlflow.entities.Param(key, str(value)[:500]) for key, value in flat]
            for first in range(0, len(params), MOST_PARAMETERS):
                self.client.log_batch(self.run_id, params=params[first : first + MOST_PARAMETERS])
            _remember(config, "mlflow", self.run_id)
        self.client.update_run(self.run_id, status="RUNNING")

    def write(self, figures: dict[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self.metric(name, value, now, step) for name, value in figures.items()]
        self._raise_failures(is_last=False)
        self.sent.append(self.sender.submit(self.client.log_batch, self.run_id, metrics))

    def close(self, is_done: bool) -> None:
        self._raise_failures(is_last=True)
        self.client.set_terminated(self.run_id, "FINISHED" if is_done else "KILLED")

    def _raise_failures(self, is_last: bool) -> None:
        """Raise an error of sending and send no more: at its end Python would wait for the whole queue."""
        try:
            while self.sent and (is_last or self.sent[0].done()):
                self.sent.pop(0).result()
        except BaseException:
            self.sender.shutdown(wait=False, cancel_futures=True)
            raise


Logger = TensorBoard | WandB | MLflow
LOGGERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def _names(config: Config) -> list[str]:
    return list(dict.fromkeys([*(["tensorboard"] if config.train.tensorboard else []), *config.train.loggers]))


def check_loggers(config: Config) -> None:
    """Raise ValueError if a logger's library is not installed, before hours of tokenizing."""
    for name in _names(config):
        load_extra(*LOGGERS[name].library)


def open_loggers(config: Config, title: str, first_step: int) -> dict[str, Logger]:
    """Open the configured loggers. ValueError: a library is not installed, or its run cannot start."""
    opened: dict[str, Logger] = {}
    for name in _names(config):
        try:
            opened[name] = LOGGERS[name](config, title, first_step)
        except (ValueError, OSError):
            raise
        except Exception as error:  # of any kind: from a server, a login, a library
            raise ValueError(f"train.loggers: {name} does not begin: {reason(error)}") from error
    return opened


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row of metrics.jsonl as {"kind/key": value}."""
    return {
        f"{row['kind']}/{key}": value
        for key, value in row.items()
        if key not in ("kind", "step") and isinstance(value, (int, float)) and math.isfinite(value)
    }


def _known(config: Config) -> dict[str, str]:
    path = Path(config.train.run_dir) / KNOWN
    return json.loads(path.read_text()) if path.exists() else {}


def _remember(config: Config, logger: str, run: str) -> None:
    path = Path(config.train.run_dir) / KNOWN
    path.write_text(json.dumps({**_known(config), logger: run}) + "\n")
