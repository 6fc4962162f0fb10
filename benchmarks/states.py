"""Codes for AdamW's moments on the states of a real training run, and in training: errors, ranges, held-out losses.

    python -m benchmarks.states                                  everything, on one GPU
    python -m benchmarks.states --runs fp32 8bit --seeds 1       some runs, for example one process for each GPU;
                                                                 a name given twice is run twice
    python -m benchmarks.states --report                         tables and figures of the rows that are there

The 124M model is trained with its layers in BF16, so that the optimizer's states are the only difference between the
runs. The first run "fp32" (FP32 moments, exact FP32 weights) is paused at --snapshots, and its states are coded in
every way that `state_codes` knows: nothing of a snapshot leaves the device but sums and histograms (`state_errors`,
`state_use`). The others train with coded moments, same seed, same tokens. Several processes may share --data (the
first one tokenizes, the others wait) and --out (a row is appended at a time); give all but one an empty --snapshots.

Rows of benchmarks/results/states.jsonl: "kind": "snapshot" or "run".
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.run_report import Row, comparable, training_text
from benchmarks.runs import (
    Visit,
    about_model,
    add_arguments,
    planned,
    read_rows,
    shared_corpus,
    train,
    write_row,
)
from benchmarks.state_errors import analyse
from benchmarks.state_figures import draw_codes, draw_ranges
from benchmarks.state_report import snapshot_checks, snapshot_text
from overcoat.train.config import Config
from overcoat.train.configfile import load_config
from overcoat.train.state import TrainState

BASELINE = "fp32"
LOSS_LIMIT = 0.005
COMMON = ["recipe.name=bf16"]
RUNS = {
    BASELINE: ["optimizer.moments=fp32", "optimizer.master=bf16+16"],
    "8bit": ["optimizer.moments=8bit", "optimizer.master=bf16+8"],
    "fp8": ["optimizer.moments=fp8", "optimizer.master=bf16+8"],
    # Which part of a difference comes from the moments, and which from the weights.
    "8bit bf16+16": ["optimizer.moments=8bit", "optimizer.master=bf16+16"],
    "fp8 bf16+16": ["optimizer.moments=fp8", "optimizer.master=bf16+16"],
    "fp32 bf16+8": ["optimizer.moments=fp32", "optimizer.master=bf16+8"],
}
USUAL_RUNS = (BASELINE, "8bit", "fp8")


def usual_snapshots(steps: int) -> list[int]:
    """Early, in warm-up; after it; half way; the end: 20, 100, 320 and 640 of 640 steps."""
    return sorted({max(1, steps // 32), max(1, steps * 5 // 32), max(1, steps // 2), steps})


def write_snapshot(state: TrainState, config: Config, identity: Row, out: Path) -> None:
    """Analyse the states as they are now and append the row."""
    start = time.perf_counter()
    figures = analyse(state.model, state.optimizer, config.optimizer.eps)
    row = {"benchmark": "states", "kind": "snapshot", **identity, **about_model(state), "step": state.step, **figures}
    row["checks"] = snapshot_checks(row)
    row["seconds"] = round(time.perf_counter() - start, 2)
    write_row(out, row)


def snapshots_of(steps: list[int], config: Config, identity: Row, out: Path) -> Visit:
    """What `train` calls: analyses the states after some of the steps."""

    def visit(state: TrainState, say: Callable[[str], None]) -> None:
        if state.step in steps:
            write_snapshot(state, config, identity, out)
            say(f"step {state.step}: states analysed")

    return visit


def run_all(arguments: argparse.Namespace) -> None:
    """Every run of every seed, one after the other; the states of the first baseline are analysed."""
    console = Console(stderr=True)
    analysed = False
    for run in planned(arguments, RUNS, COMMON):
        steps = load_config(arguments.config, run.settings).train.steps
        snapshots = chosen_snapshots(arguments.snapshots, steps) if run.name == BASELINE and not analysed else []
        analysed |= run.name == BASELINE
        # Where the loop would save a checkpoint, the states are looked at; 0 is never.
        config = load_config(arguments.config, [*run.settings, f"checkpoint.every={math.gcd(*snapshots)}"])
        identity = {**run.identity, "steps": steps}
        visit = snapshots_of(snapshots, config, identity, arguments.out)
        row = train(config, shared_corpus(config, console), run.title, console, visit)
        write_row(arguments.out, {"benchmark": "states", "kind": "run", **identity, **row})
        console.print(f"{run.title}: held-out loss {row['held_out_loss']:.4f}", highlight=False)


def chosen_snapshots(wanted: list[int] | None, steps: int) -> list[int]:
    """The steps to analyse; ValueError if one is not in the run."""
    chosen = usual_snapshots(steps) if wanted is None else wanted
    for step in chosen:
        if not 1 <= step <= steps:
            raise ValueError(f"--snapshots {step}: the run has the steps 1 to {steps}")
    return chosen


def report(rows: list[Row], figures: Path) -> None:
    """Print every table and draw the figures of the last step among the snapshots, of the first seed."""
    snapshots = [row for row in rows if row["kind"] == "snapshot"]
    for row in snapshots:
        print(snapshot_text(row))
    for runs in comparable(row for row in rows if row["kind"] == "run"):
        print(training_text(runs, BASELINE, LOSS_LIMIT))
    if snapshots:
        last = max(snapshots, key=lambda row: (row["step"], -row["seed"]))
        draw_ranges(last, figures / "optimizer-states-range.png")
        draw_codes(last, figures / "optimizer-states-codes.png")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, RUNS, list(USUAL_RUNS), "states.jsonl")
    parser.add_argument(
        "--snapshots",
        nargs="*",
        type=int,
        help=f"steps of the first {BASELINE} to analyse; default four; none if empty",
    )
    return parser.parse_args(arguments)


def main(argv: list[str] | None = None) -> Any:
    """Run what is asked for, then report all rows of --out."""
    arguments = parse(argv)
    if not arguments.report:
        run_all(arguments)
    report(read_rows(arguments.out), arguments.figures)


if __name__ == "__main__":
    main()
