"""Train the 124M Llama with several recipes on the same tokens and compare losses, speed and memory.

    python -m benchmarks.training                                  the usual runs, 21 M tokens each, on one GPU
    python -m benchmarks.training --runs bf16 paper --seeds 0 1    some runs
    python -m benchmarks.training --steps 3052 --set data.max_bytes=400_000_000      100 M tokens
    python -m benchmarks.training --report                         tables and curves of the recorded rows

Each run is what `overcoat train` does. The baseline is "bf16" of the same seed: BF16 layers, FP32
moments, exact FP32 weights. A name given twice runs twice, which shows the noise of the GPU's unordered sums. With
several GPUs, start one process per GPU with its own --runs; the token cache in --data may be shared.
One row of results/training.jsonl per run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import RESULTS, append_row
from benchmarks.paper.arms import ARMS, BASELINE, train
from benchmarks.report import report
from overcoat.train.config import Config
from overcoat.train.configfile import load_config

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "llama-124m.toml"
USUAL_RUNS = (BASELINE, "default", "paper", "leanest", "block")


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


def main(argv: list[str] | None = None) -> None:
    """Train what is asked for, then report all rows of --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=ARMS, default=USUAL_RUNS)
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
            settings = [*arguments.set, *ARMS[name], f"train.seed={seed}", f"data.cache_dir={data}"]
            config = load_config(arguments.config, settings)
            if arguments.steps is not None:
                settings += lengthened(config, arguments.steps)
            figures = train(asdict(config), settings, Path(folder) / str(number))
            identity = {"run": name, "seed": seed, "config": arguments.config.name, "set": arguments.set}
            steps = arguments.steps or config.train.steps
            append_row(arguments.out, {"benchmark": "training", "kind": "run", **identity, "steps": steps, **figures})
            print(f"{name}, seed {seed}: held-out loss {figures['held_out_loss']:.4f}", file=sys.stderr, flush=True)
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    report([row for row in rows if row.get("kind") == "run"], arguments.figures)


if __name__ == "__main__":
    main()
