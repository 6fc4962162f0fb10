"""Trainings to be compared: the same model, tokens, order and seed under several recipes, by `overcoat train`."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from overcoat.bench.rows import Row
from overcoat.memory import use_expandable_segments
from overcoat.train.config import Config
from overcoat.train.configfile import build_config
from overcoat.train.run import run
from overcoat.train.summary import summarize

BASELINE = "bf16"
# Settings of every arm: nothing but the training itself.
BARE = ["compare.overrides=[]", "sample.tokens=0", "train.tensorboard=false", "checkpoint.every=0"]
EXACT = ["optimizer.moments=fp32", "optimizer.master=bf16+16"]
ARMS = {
    BASELINE: ["recipe.name=bf16", *EXACT],
    "default": [],
    "paper": ["recipe.name=paper", "optimizer.moments=fp8"],
    "leanest": ["recipe.name=leanest"],
    "e4m3": ["recipe.grad_format=e4m3"],
    "block": ["recipe.linear_scaling=block"],
    # Which part of a difference comes from the layers, and which from the optimizer.
    "default-fp32": EXACT,
    "bf16-8bit": ["recipe.name=bf16"],
    "bf16-fp8": ["recipe.name=bf16", "optimizer.moments=fp8"],
    "bf16-head": ["recipe.name=bf16", "recipe.head=bf16", *EXACT],
}
CURVE_POINTS = 200


def lengthened(usual: Config, steps: int) -> list[str]:
    """Settings for a run of `steps` steps: the schedule stretched in proportion, about 16 evaluations."""
    factor = steps / usual.train.steps
    return [
        f"train.steps={steps}",
        f"schedule.warmup_steps={math.ceil(usual.schedule.warmup_steps * factor)}",
        f"schedule.decay_steps={math.floor(usual.schedule.decay_steps * factor)}",
        f"eval.every={max(1, steps // 16)}",
        f"train.log_every={max(1, steps // 100)}",
    ]


def train(values: dict[str, Any], settings: list[str], run_dir: Path) -> Row:
    """Run `overcoat train` on nested `values` with `settings` to its end, or go on with it.

    Returns:
        The figures of results.json, what identifies the data, and both loss curves of metrics.jsonl by step.
    """
    use_expandable_segments()
    config = build_config(values, [*BARE, *settings, f"train.run_dir={run_dir}"])
    console = Console(file=io.StringIO())
    (figures,) = summarize(run(config, console), run_dir, console)["runs"]
    losses: dict[str, dict[int, float]] = {"train": {}, "eval": {}}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] in losses:
            losses[row["kind"]][row["step"]] = row["loss"]
    saved = torch.load(Path(figures["checkpoint"]) / "training.pt", map_location="cpu", weights_only=True, mmap=True)
    kept = {key: value for key, value in figures.items() if isinstance(value, (int, float))}
    curves = {"train_losses": curve(losses["train"]), "held_out_losses": losses["eval"]}
    return {"data": saved["data_identity"], **kept, **curves}


def curve(losses: Mapping[int, float], points: int = CURVE_POINTS) -> dict[int, float]:
    """At most `points` means over neighbouring steps, each under its last step."""
    steps = list(losses)
    width = math.ceil(len(steps) / points)
    parts = [steps[first : first + width] for first in range(0, len(steps), width)]
    return {part[-1]: round(statistics.fmean(losses[step] for step in part), 4) for part in parts}
