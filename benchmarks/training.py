"""Train the 124M Llama with several recipes on the same tokens and compare losses, speed and memory.

    python -m benchmarks.training                                  the usual runs, 21 M tokens each, on one GPU
    python -m benchmarks.training --runs bf16 paper --seeds 0 1    some runs
    python -m benchmarks.training --steps 3052 --set data.max_bytes=400_000_000      100 M tokens
    python -m benchmarks.training --report                         tables and curves of the recorded rows

Each run is `overcoat train` in a process of its own. The baseline is "bf16" of the same seed: BF16 layers, FP32
moments, exact FP32 weights. A name given twice runs twice, which shows the noise of the GPU's unordered sums. With
several GPUs, start one process per GPU with its own --runs; the token cache in --data may be shared.
One row of results/training.jsonl per run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, append_row
from benchmarks.report import BASELINE, report
from overcoat.train.configfile import load_config

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "llama-124m.toml"
CURVE_POINTS = 200
# Settings of every run: nothing but the training itself.
BARE = ["compare.overrides=[]", "sample.tokens=0", "train.tensorboard=false", "checkpoint.every=0"]
EXACT = ["optimizer.moments=fp32", "optimizer.master=bf16+16"]
RUNS = {
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
USUAL_RUNS = (BASELINE, "default", "paper", "leanest", "block")
Row = dict[str, Any]


def lengthened(config: Path, settings: list[str], steps: int) -> list[str]:
    """Settings for a run of `steps` steps: the schedule stretched in proportion, about 16 evaluations."""
    usual = load_config(config, settings)
    factor = steps / usual.train.steps
    return [
        f"train.steps={steps}",
        f"schedule.warmup_steps={math.ceil(usual.schedule.warmup_steps * factor)}",
        f"schedule.decay_steps={math.floor(usual.schedule.decay_steps * factor)}",
        f"eval.every={max(1, steps // 16)}",
        f"train.log_every={max(1, steps // 100)}",
    ]


def train(config: Path, settings: list[str], run_dir: Path) -> Row:
    """Run `overcoat train` to its end.

    Returns:
        The figures of results.json, with both loss curves of metrics.jsonl by step.

    Raises:
        subprocess.CalledProcessError: the run failed; its message is on stderr.
    """
    command = [sys.executable, "-m", "overcoat.cli", "train", str(config), *settings, f"train.run_dir={run_dir}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (figures,) = json.loads((run_dir / "results.json").read_text())["runs"]
    checkpoint = torch.load(Path(figures["checkpoint"]) / "training.pt", map_location="cpu", mmap=True)
    losses: dict[str, dict[int, float]] = {"train": {}, "eval": {}}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] in losses:
            losses[row["kind"]][row["step"]] = row["loss"]
    kept = {key: value for key, value in figures.items() if isinstance(value, (int, float))}
    curves = {"train_losses": curve(losses["train"]), "held_out_losses": losses["eval"]}
    return {"data": checkpoint["data_identity"], **kept, **curves}


def curve(losses: Mapping[int, float], points: int = CURVE_POINTS) -> dict[int, float]:
    """At most `points` means over neighbouring steps, each under its last step."""
    steps = list(losses)
    width = math.ceil(len(steps) / points)
    parts = [steps[first : first + width] for first in range(0, len(steps), width)]
    return {part[-1]: round(statistics.fmean(losses[step] for step in part), 4) for part in parts}


def main(argv: list[str] | None = None) -> None:
    """Train what is asked for, then report all rows of --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=USUAL_RUNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, help="length of a run; default: the config file's")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings for every run")
    parser.add_argument("--data", type=Path, help="folder for the tokens; default: temporary")
    parser.add_argument("--out", type=Path, default=RESULTS / "training.jsonl")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "research", help="folder for the curves")
    parser.add_argument("--report", action="store_true", help="train nothing, report what --out holds")
    arguments = parser.parse_args(argv)
    names = [] if arguments.report else arguments.runs
    with tempfile.TemporaryDirectory() as folder:
        for number, (seed, name) in enumerate((seed, name) for seed in arguments.seeds for name in names):
            data = arguments.data or Path(folder) / "data"
            settings = [*BARE, *arguments.set, *RUNS[name], f"train.seed={seed}", f"data.cache_dir={data}"]
            if arguments.steps is not None:
                settings += lengthened(arguments.config, settings, arguments.steps)
            figures = train(arguments.config, settings, Path(folder) / str(number))
            identity = {"run": name, "seed": seed, "config": arguments.config.name, "set": arguments.set}
            steps = load_config(arguments.config, settings).train.steps
            append_row(arguments.out, {"benchmark": "training", "kind": "run", **identity, "steps": steps, **figures})
            print(f"{name}, seed {seed}: held-out loss {figures['held_out_loss']:.4f}", file=sys.stderr, flush=True)
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    report([row for row in rows if row.get("kind") == "run"], arguments.figures)


if __name__ == "__main__":
    main()
