"""Predicted beside measured times of whole steps: every run of ours that the result rows hold.

    python -m tests.estimate.recorded

Rows of `python -m benchmarks model` (model.jsonl, printed.jsonl) and of FSDP2 on two GPUs (sharded.jsonl).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contestants import trainer_of
from benchmarks.optimizer import OPTIMIZERS
from overcoat.estimate.predict import Predictor
from overcoat.estimate.setup import Setup
from overcoat.estimate.times import HOSTS, Cluster, Times
from overcoat.models.shapes import MODELS
from overcoat.recipe import Recipe

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHARDED = {
    "7b default": (MODELS["llama-2-7b"], Recipe()),
    "7b train": (MODELS["llama-2-7b"], Recipe()),
    "7b leanest": (MODELS["llama-2-7b"], Recipe.leanest()),
    "7b accumulation": (MODELS["llama-2-7b"], Recipe()),
    "13b default": (MODELS["llama-2-13b"], Recipe()),
}


class Run(NamedTuple):
    """A measured run, and what is predicted for it. graphs: the host does not take part."""

    name: str
    measured: float
    predicted: Times
    graphs: bool

    @property
    def seconds(self) -> float:
        return self.predicted.on_gpu if self.graphs else self.predicted.step

    @property
    def error(self) -> float:
        return self.seconds / self.measured - 1

    @property
    def bound(self) -> str:
        """What limits the run: "GPU" if beyond doubt, since a slow host would need less; "link" to host memory."""
        if self.predicted.most_crossing > 1:
            return "link"
        return "GPU" if self.graphs or HOSTS[1] * self.predicted.host < self.seconds else "host"


def setup_of(name: str, frozen: bool = False) -> Setup | None:
    """What a contestant is for `overcoat.estimate`, if it is ours. frozen: the vision tower."""
    trainer = trainer_of(name)
    if trainer.engine.recipe is None:
        return None
    options = {key: value for key, value in OPTIMIZERS[trainer.optimizer].options.items() if key != "check_finite"}
    options |= {"release_gradients": trainer.released, "all_gather": "fp8" if trainer.fp8_all_gather else "bf16"}
    options |= {"stream": trainer.streamed, "resident": trainer.resident}
    return Setup(trainer.engine.recipe, freeze_tower=frozen, **options)


def cluster_of(row: dict[str, Any]) -> Cluster:
    """The GPUs of a row."""
    return Cluster(row.get("gpus") or 1, gpu="h100" if "H100" in row["gpu"] else "h200")


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Those of one file."""
    for line in (RESULTS / f"{name}.jsonl").read_text().splitlines():
        yield json.loads(line)


def measured() -> Iterator[tuple[str, Any, float, bool, tuple[Any, ...]]]:
    """Of each run of ours: its name, model, seconds, whether it is CUDA graphs, and what `Predictor.times` is told."""
    found = (*rows("model"), *(row for row in rows("printed") if row["benchmark"] == "model"))
    for row in sorted(found, key=lambda row: str(row["date"])):
        model, frozen = row["model"].split(",")[0], row.get("tower") == "frozen"
        gpus = row.get("gpus", 0)  # 1: FSDP2 over one GPU, which the estimate takes for none
        if "tokens_per_second" not in row or not row["name"].startswith("overcoat") or gpus == 1:
            continue
        setup, graphs = setup_of(row["name"], frozen), trainer_of(row["name"]).engine.graphs
        name = f"{row['commit'][:7]} {model} {row['batch']} x {row['sequence']}, {row['name']}{', frozen' * frozen}"
        seconds = row["batch"] * row["sequence"] / row["tokens_per_second"]
        name += f", {gpus} GPUs" * bool(gpus)
        yield name, MODELS[model], seconds, graphs, (row["batch"], row["sequence"], setup, cluster_of(row))
    for row in rows("sharded"):
        if "gpus" not in row:  # of fp8_all_gather: one GPU
            continue
        if row.get("case") in SHARDED:
            model, recipe = SHARDED[row["case"]]
        elif (row["gpus"] > 1 or row.get("travel") is None) and "layers" in row:
            model, recipe = MODELS["llama-2-7b"].changed(num_hidden_layers=row["layers"]), Recipe()
        else:  # a peer, FSDP2 over one GPU
            continue
        fp8 = row.get("travel") == "fp8"
        options: dict[str, Any] = {"all_gather": "fp8" if fp8 else "bf16", "reduce_dtype": row.get("reduce_dtype")}
        setup = Setup(recipe, accumulation=row.get("accumulation", 1), **options)
        name = f"{row['commit']} {row.get('case', '7b, 8 layers')}{', FP8' * fp8}, {row['gpus']} GPUs"
        yield name, model, row["ms"] / 1e3, False, (row["batch"], row["sequence"], setup, cluster_of(row))


def runs(words: Sequence[str] = ("",)) -> Iterator[Run]:
    """Those with one of the words in their names, predicted; of runs that were repeated the last, since what is
    predicted is today's code."""
    predictors: dict[Any, Predictor] = {}
    last = {run[0].partition(" ")[2]: run for run in measured()}
    for name, model, seconds, graphs, work in last.values():
        if any(word in name for word in words):
            predictor = predictors.setdefault(str(model), Predictor(model.config()))
            yield Run(name, seconds, predictor.times(*work), graphs)


def main() -> None:
    """Print a line for each, and the errors in all."""
    found = list(runs())
    for run in sorted(found, key=lambda run: abs(run.error)):
        print(f"{run.error:+7.1%}  {run.measured * 1e3:8.1f} ms  {run.bound:4s}  {run.name}")
    titles = {"GPU": "bounded by the GPU", "host": "by the host, or near it", "link": "by copies of streamed weights"}
    for bound, title in titles.items():
        errors = [abs(run.error) for run in found if run.bound == bound]
        print(f"{len(errors)} runs {title}: median {statistics.median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
