"""Read a run for the report: the files in its directory, and the estimate of its step."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overcoat.estimate.predict import Prediction, Predictor
from overcoat.extras import load_pretrained, reason
from overcoat.train.batch_plan import BatchPlan, configured_plan, training_setup
from overcoat.train.build import loss_for_estimates
from overcoat.train.checkpoint import checkpoint_dir, list_checkpoints, num_processes
from overcoat.train.config import Config
from overcoat.train.configfile import load_config
from overcoat.train.metrics import METRICS, Row, is_count, read_metrics

SHOWN = {"num_parameters", "kept_bytes", "optimizer_bytes", "passes"}  # numbers of results.json


@dataclass
class Run:
    """metrics: from `read_metrics`. result: the run's entry in results.json, {} before its end. memory: memory.json, or
    {}. prediction: the estimate of its step on a GPU, or why there is none."""

    name: str
    folder: Path
    config: Config
    metrics: dict[str, dict[int, Row]]
    result: dict[str, Any]
    memory: dict[str, Any]
    prediction: Prediction | str

    def tokens(self, step: int) -> int:
        """Return the tokens that all processes have trained on by the end of a step.

        A run may resume with another batch size. If an older run did not record them, they follow from the
        configuration.
        """
        supposed = step * self.config.train.rows_per_step * self.config.data.sequence_length
        return self.metrics["train"].get(step, {}).get("total_tokens", supposed)


def read_runs(names: list[str]) -> list[Run]:
    """Return the runs of these directories, and the second runs ([compare]) inside them.

    ValueError: a directory is no run, or has nothing to show yet.
    """
    if not all(map(str.strip, names)):
        raise ValueError("a RUN is empty: give the directory of a run")
    folders: list[Path] = []
    for name in names:
        folders += [folder for folder in (Path(name), Path(name) / "twin") if folder == Path(name) or folder.exists()]
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    for folder in folders:
        if not (folder / "config.toml").exists():
            raise ValueError(f"{folder} is no run of overcoat: it has no config.toml")
    common = Path(os.path.commonpath([folder.parent for folder in folders]))
    return [_read(folder, str(folder.relative_to(common))) for folder in folders]


def _read(folder: Path, name: str) -> Run:
    config, metrics = load_config(folder / "config.toml", is_recorded=True), read_metrics(folder / METRICS)
    if not metrics["train"]:
        raise ValueError(f"{folder} has no step in {METRICS} yet: ask again once it has trained")
    # The first run's directory has the results of both.
    place = folder.parent if folder.name == "twin" and (folder.parent / "results.json").exists() else folder
    results = _json(place / "results.json", "runs")["runs"]
    result = results[-1 if place != folder else 0] if results else {}
    memory = _json(folder / "memory.json", "measured")
    return Run(name, folder, config, metrics, result, memory, _predict(folder, config, metrics))


def _json(path: Path, key: str) -> dict[str, Any]:
    """Return the JSON object in a file, with a list of objects under `key`; {} if there is no file.

    ValueError: the file holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {key: []}
        if not isinstance(found[key], list) or not all(isinstance(each, dict) for each in found[key]):
            raise TypeError(f"{key} are no objects")
        _check_shown(found, key)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({reason(error)}): remove it, and ask again") from error
    return found


def _check_shown(found: dict[str, Any], key: str) -> None:
    """Raise TypeError if a value that the page shows is missing or of another type."""
    figures, texts = [], []
    for each in found[key]:
        named = ("peak",) if key == "measured" else each.keys() & SHOWN
        figures += [(name, each.get(name)) for name in named]
        named = ("label",) if key == "measured" else each.keys() & {"device", "sample", "start"}
        texts += [(name, each.get(name)) for name in named]
    for each in found.get("branches", []):
        figures += [(name, each[name]) for name in ("layers", "before", "after")]
        texts += [(name, each[name]) for name in ("branch", "kind", "state")]
    if wrong := [name for name, value in texts if not isinstance(value, str)]:
        raise TypeError(f"{wrong[0]} is no text")
    if key == "measured" and found[key]:
        peak = found["figures"]["peak of the step"]
        figures += [(name, peak[name]) for name in ("predicted", "measured")]
    if wrong := [name for name, value in figures if not is_count(value)]:
        raise TypeError(f"{wrong[0]} is no number from 0 on")


def _predict(folder: Path, config: Config, metrics: dict[str, dict[int, Row]]) -> Prediction | str:
    """Return the estimate for the run's model and its last micro-batch size, or why there is none."""
    if config.not_estimated:
        return config.not_estimated
    made = [folder / "export", *list_checkpoints(checkpoint_dir(config))]
    model = next((path for path in made if (path / "config.json").exists()), None)
    if model is None:
        return "there is no checkpoint yet that says what the model is"
    if num_processes(made[-1]) > 1:
        return "the run had several processes, whose estimate is overcoat estimate --config CONFIG.toml --gpus N"
    plans = list(metrics["fit"].values())
    if not plans and config.train.batch_size == "auto":
        return "the run has not recorded how many rows passed at once"
    plan = (
        BatchPlan(plans[-1]["micro_batch"], bool(plans[-1]["block_checkpoints"])) if plans else configured_plan(config)
    )
    try:
        predictor = Predictor(
            load_pretrained("AutoConfig", "the model", str(model), False),
            loss_for_estimates(config.data.masks_documents),
        )
        return predictor.predict(plan.micro_batch, config.data.sequence_length, training_setup(config, plan))
    except Exception as error:  # of any kind: the files of a model are read by transformers
        return reason(error)
