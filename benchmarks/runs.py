"""Training runs as benchmarks: a configuration trained to its figures, one result row for each run.

What `states`, `training` and `activations` share. Several processes, one for each GPU, may run at once: they share
--data (the first one tokenizes, the others wait) and --out (a row is appended at a time).
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from benchmarks.common import RESULTS, append_row
from benchmarks.run_report import Row
from overcoat import memory
from overcoat.train.auto_batch import first_fit
from overcoat.train.build import choose_device
from overcoat.train.config import Config
from overcoat.train.configfile import load_config
from overcoat.train.corpus import Corpus, cache_dir, open_corpus
from overcoat.train.data import PackedRows
from overcoat.train.loop import train_steps
from overcoat.train.metrics import MetricsLog, ProgressReport, read_metrics
from overcoat.train.run import make_state
from overcoat.train.state import TrainState

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "llama-124m.toml"
# Nothing but the training itself.
BARE = ["compare.overrides=[]", "sample.tokens=0", "train.tensorboard=false", "checkpoint.every=0"]
CURVE_POINTS = 200
EVALUATIONS = 16
LOG_LINES = 100

Visit = Callable[[TrainState, Callable[[str], None]], None]


# ---- what processes share ------------------------------------------------------------------------------


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a file or folder for this process; others that ask wait."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_row(out: Path, row: Row) -> None:
    """Append a row, also when other processes do."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()
    with exclusive(out):
        append_row(out, row)


def read_rows(path: Path, kind: str | None = None) -> list[Row]:
    """The rows of a results file, or those of one "kind"."""
    if not path.exists():
        raise ValueError(f"--out {path}: no such file; run the benchmark first")
    with exclusive(path):  # not while another process is in the middle of a line
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if kind in (None, row.get("kind"))]


def shared_corpus(config: Config, console: Console) -> Corpus:
    """The data of `config`, tokenized by the first process that asks."""
    folder = cache_dir(config)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        start = time.perf_counter()
        corpus = open_corpus(config, console.print)
        console.print(f"data ready after {time.perf_counter() - start:.1f} s", highlight=False)
    return corpus


# ---- the command line ----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser, runs: Mapping[str, list[str]], usual: list[str], out: str) -> None:
    """The options of every benchmark that trains several runs."""
    parser.add_argument("--runs", nargs="+", choices=runs, default=usual)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings for every run")
    parser.add_argument("--data", type=Path, help="where tokens are kept; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS / out)
    parser.add_argument("--figures", type=Path, default=ROOT / "docs", help="folder of the images")
    parser.add_argument("--report", action="store_true", help="train nothing, report what --out holds")


class Run(NamedTuple):
    """One run to train: its settings on top of the config file, and what its rows say of it."""

    name: str
    seed: int
    settings: list[str]
    identity: Row

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.seed}"


def planned(arguments: argparse.Namespace, runs: Mapping[str, list[str]], common: Sequence[str] = ()) -> Iterator[Run]:
    """Every run of every seed, with the `common` settings and its own; its run directory lasts until the next."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for name in arguments.runs:
                with tempfile.TemporaryDirectory(dir=folder) as run_dir:
                    places = [f"train.run_dir={run_dir}", f"data.cache_dir={arguments.data or Path(folder) / 'data'}"]
                    settings = [*BARE, *common, *arguments.set, *runs[name], f"train.seed={seed}", *places]
                    identity = {"run": name, "seed": seed, "config": arguments.config.name, "set": arguments.set}
                    yield Run(name, seed, settings, identity)


def scaled(path: Path, settings: list[str], steps: int) -> Config:
    """The configuration with another length: the schedule stretched in proportion, few evaluations and log lines."""
    config = load_config(path, settings)
    warmup = config.schedule.warmup_steps * steps / config.train.steps
    decay = config.schedule.decay_steps * steps / config.train.steps
    changes = [
        f"train.steps={steps}",
        f"schedule.warmup_steps={math.ceil(warmup)}",
        f"schedule.decay_steps={math.floor(decay)}",
        f"eval.every={max(1, steps // EVALUATIONS)}",
        f"train.log_every={max(1, steps // LOG_LINES)}",
    ]
    return load_config(path, [*settings, *changes])


def steps_for(config: Config, tokens: int) -> int:
    """How many optimizer steps see at least `tokens` tokens."""
    return math.ceil(tokens / (config.train.rows_per_step * config.data.sequence_length))


# ---- one run -------------------------------------------------------------------------------------------


def train(config: Config, corpus: Corpus, title: str, console: Console, visit: Visit | None = None) -> Row:
    """Train one run to its end.

    Args:
        config: its run_dir exists.
        corpus: opened for this run: it remembers how far it was read.
        visit: called with the state, and with what prints a line, every `checkpoint.every` steps and at the end.

    Returns:
        The figures of the finished run.
    """
    gc.collect()  # the run before, whose memory would count as this one's
    device = choose_device(config.train.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    start = time.perf_counter()
    state, _ = make_state(config, corpus, device, first_fit(config, device, corpus.tokenizer))
    run_dir = Path(config.train.run_dir)

    def pause() -> Path:
        if visit is not None:
            visit(state, progress.say)
        return run_dir

    log, progress = MetricsLog(config, 0), ProgressReport(console, title, config.train.steps, 0)
    try:
        train_steps(state, config, corpus.held_out, log, progress, pause)
    finally:
        progress.close()
        log.close()
    seconds = round(time.perf_counter() - start, 1)
    return {**about_model(state), **_figures(config, state), "epoch_tokens": epoch_tokens(corpus), "seconds": seconds}


def about_model(state: TrainState) -> Row:
    """What tells the runs on one model and the same data from others."""
    num_parameters = sum(parameter.numel() for parameter in state.model.parameters())
    return {"data": state.data_identity, "num_parameters": num_parameters, "num_tokens": state.num_tokens}


def epoch_tokens(corpus: Corpus) -> int | None:
    """How many different tokens the training rows hold; None if they are streamed."""
    rows = corpus.rows
    return rows.num_rows * rows.length if isinstance(rows, PackedRows) else None


def _figures(config: Config, state: TrainState) -> Row:
    metrics = read_metrics(Path(config.train.run_dir) / "metrics.jsonl")
    rows = metrics["train"].values()
    losses = {step: row["loss"] for step, row in metrics["train"].items()}
    last = list(losses.values())[-max(1, config.train.steps // 10) :]
    return {
        "held_out_loss": metrics["eval"][state.step]["loss"],
        "held_out_losses": {step: row["loss"] for step, row in metrics["eval"].items()},
        "train_loss": statistics.fmean(last),
        "train_losses": curve(losses),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows),
        "peak_bytes": max(row["peak_bytes"] for row in rows),
        "kept_bytes": state.kept_bytes,
        "optimizer_bytes": memory.optimizer_bytes(state.optimizer),
        "skipped_steps": int(state.optimizer.skipped_steps) if state.optimizer.skipped_steps is not None else 0,
    }


def curve(losses: Mapping[int, float], points: int = CURVE_POINTS) -> dict[int, float]:
    """At most `points` means over neighbouring steps, each under its last step."""
    steps = list(losses)
    width = math.ceil(len(steps) / points)
    parts = [steps[first : first + width] for first in range(0, len(steps), width)]
    return {part[-1]: round(statistics.fmean(losses[step] for step in part), 4) for part in parts}
