"""Table 3 and its loss curves: the same training under several recipes, side by side.

    python -m benchmarks paper table3 --full --arms bf16 --seeds 0 --dir runs/olmo --json olmo.jsonl    an arm
    python -m benchmarks paper table3 --full --config configs/olmo-124m.toml

A run that was cut off goes on, one that has ended is read: the same command shows all that --dir holds. The text is the
Python source of what is installed on the machine, each document once.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import math
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.rows import Result, Row
from overcoat.eval.command import find_target, load_target
from overcoat.memory import use_expandable_segments
from overcoat.models.shapes import MODELS
from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.configfile import build_config, load_config
from overcoat.train.evaluate import Tasks, task_names
from overcoat.train.metrics import read_metrics
from overcoat.train.process import choose_device
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
USUAL = (BASELINE, "default", "paper")
CURVE_POINTS = 200


def train(values: dict[str, Any], settings: list[str], run_dir: Path) -> Row:
    """Run `overcoat train` on nested `values` with `settings` to its end, or go on with it: the figures of
    results.json, what identifies the data, and both loss curves of metrics.jsonl by step."""
    use_expandable_segments()
    config = build_config(values, [*BARE, *settings, f"train.run_dir={run_dir}"])
    console = Console(file=io.StringIO())
    (figures,) = summarize(run(config, console), run_dir, console)["runs"]
    metrics = read_metrics(Path(figures["metrics"]))
    losses = {kind: {step: row["loss"] for step, row in metrics[kind].items()} for kind in ("train", "eval")}
    saved = torch.load(Path(figures["checkpoint"]) / "training.pt", map_location="cpu", weights_only=True, mmap=True)
    kept = {key: value for key, value in figures.items() if isinstance(value, (int, float))}
    curves = {"train_losses": curve(losses["train"]), "held_out_losses": losses["eval"]}
    return {"data": saved["data_identity"], **kept, **curves}


def curve(losses: Mapping[int, float]) -> dict[int, float]:
    """At most CURVE_POINTS means over neighbouring steps, each under its last step."""
    steps = list(losses)
    width = math.ceil(len(steps) / CURVE_POINTS)
    parts = [steps[first : first + width] for first in range(0, len(steps), width)]
    return {part[-1]: round(statistics.fmean(losses[step] for step in part), 4) for part in parts}


# What the small sizes look at in place of a real run: about 0.6 million parameters on a part of
# Python's own source, seconds on two cores.
TINY: dict[str, Any] = {
    "model": {"config": {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }},
    "tokenizer": {"vocab_size": 512},
    "data": {"files": ["stdlib"], "max_bytes": 300_000, "sequence_length": 128},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup_steps": 5},
    "train": {"steps": 30, "batch_size": 4},
}  # fmt: skip


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()  # until the process ends


@functools.cache
def tiny_run() -> Path:
    """The run directory of the model, trained in BF16 with FP32 moments once a process."""
    run_dir = Path(_folder().name) / "tiny"
    train(TINY, ["recipe.name=bf16", *EXACT], run_dir)
    return run_dir


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the newest checkpoint of a run directory, or the path itself if it is one. ValueError: there is none."""
    found = list_checkpoints(run_dir / "checkpoints") or [run_dir]
    if not (found[-1] / "training.pt").is_file():
        raise ValueError(f"--checkpoint {run_dir}: no run directory or checkpoint of `overcoat train`")
    return found[-1]


# The paper's training of OLMo-1B, on this machine's text and with a shorter warm-up.
OLMO_1B: dict[str, Any] = {
    "model": {"config": {"model_type": "olmo", **MODELS["olmo-1b"].fields}},
    "tokenizer": {"vocab_size": 50304},
    "data": {"files": ["site-packages", "stdlib"], "dedupe": True, "sequence_length": 2048},
    "optimizer": {"lr": 4e-4, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1},
    "schedule": {"warmup_steps": 100},
    "train": {"steps": 1000, "batch_size": 32},
    "eval": {"every": 100},
}
PAPER_LOSS = {BASELINE: 2.551, "default": 2.568, "paper": 2.568}


def pretrained(options: argparse.Namespace, folder: Path) -> list[Row]:
    """A row for each seed and arm; their directories, and that of their tokens, are in `folder`."""
    if not options.full:
        values = {**TINY, "eval": {"every": 10}}
    else:
        values = OLMO_1B if options.config is None else asdict(load_config(options.config))
    rows = []
    for seed, arm in itertools.product(options.seeds, options.arms):
        run_dir = folder / f"{arm}-{seed}"
        settings = [*ARMS[arm], f"train.seed={seed}", f"data.cache_dir={folder / 'data'}", *options.set]
        row = train(values, settings, run_dir)
        row |= {"name": f"{arm}, seed {seed}", "arm": arm, "seed": seed, "paper": PAPER_LOSS.get(arm)}
        row |= {"run_dir": run_dir, "perplexity": math.exp(row["held_out_loss"]), "peak GB": row["peak_bytes"] / 1e9}
        rows.append(row)
    return rows


def with_gaps(rows: list[Row]) -> tuple[list[Row], str]:
    """The rows with their gaps to the baseline of the same seed, and how far its seeds lie apart."""
    base = {row["seed"]: row["held_out_loss"] for row in rows if row["arm"] == BASELINE}
    for row in rows:
        row["gap"] = row["held_out_loss"] - base[row["seed"]] if row["seed"] in base else None
    if len(base) < 2:
        return rows, f"One seed of {BASELINE}: a gap has nothing to be compared with; give --seeds 0 1."
    return rows, f"Standard deviation of {BASELINE} over {len(base)} seeds: {statistics.stdev(base.values()):.4f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="with --full: train this, not OLMo-1B")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings of every arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=USUAL, help="these alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the arms (default 0)")
    parser.add_argument("--dir", type=Path, help="keep the runs there, and go on with what is there")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="of overcoat eval")


def table3(options: argparse.Namespace) -> Result:
    """Pretraining: held-out loss, perplexity and, with --tasks, lm-evaluation-harness' tasks of every arm."""
    columns: tuple[str, ...] = ("paper", "held_out_loss", "gap", "perplexity", "tokens_per_second", "peak GB")
    if options.config and not options.full:
        raise ValueError(f"--config {options.config}: give --full, the small size trains a tiny model")
    tasks = Tasks(names) if (names := task_names(options.tasks)) else None
    with tempfile.TemporaryDirectory() as temporary:
        rows, spread = with_gaps(pretrained(options, options.dir or Path(temporary)))
        for row in rows:
            run_dir = row.pop("run_dir")
            if tasks is not None:
                model, tokenizer = load_target(find_target(str(run_dir)), choose_device("auto"))
                for task, figures in tasks.evaluate(model, tokenizer, 8, None):
                    row |= {f"{task} {key}": value for key, value in figures.items()}
                    columns += tuple(f"{task} {key}" for key in figures if f"{task} {key}" not in columns)
    data = {row["data"][:12] for row in rows}
    same = "the same tokens, of one seed in the same order" if len(data) == 1 else "DIFFERENT TOKENS"
    notes = (spread, f"All arms: {same} ({', '.join(data)}). Paper: OLMo-1B after 300 B tokens, COAT +0.017.")
    return "Table 3: pretraining", rows, columns, notes
