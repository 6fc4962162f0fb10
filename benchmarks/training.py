"""The 124M Llama trained in FP8 and in BF16 on the same tokens in the same order: losses, curves, speed, memory.

    python -m benchmarks.training                                      the usual runs, 21 M tokens each, on one GPU
    python -m benchmarks.training --runs bf16 paper --seeds 0 1        some runs, for example one process for each GPU
    python -m benchmarks.training --tokens 100_000_000 --set data.max_bytes=400_000_000
                                                                       longer, on more text; the schedule stretches
    python -m benchmarks.training --prepare                            tokenize into --data and say how much there is
    python -m benchmarks.training --report                             tables and curves of the rows that are there

Every run is compared with "bf16" of the same seed: layers in BF16, FP32 moments, exact FP32 weights. A name given
twice is run twice, which shows the noise of the GPU's unordered sums. Several processes may share --data and --out.

Rows of benchmarks/results/training.jsonl: "kind": "run". Curves: docs/training-21m.png, named after the tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks.run_figures import draw_curves
from benchmarks.run_report import Row, comparable, training_text
from benchmarks.runs import (
    add_arguments,
    epoch_tokens,
    planned,
    read_rows,
    scaled,
    shared_corpus,
    steps_for,
    train,
    write_row,
)
from overcoat.train.config import Config
from overcoat.train.configfile import load_config

BASELINE = "bf16"
LOSS_LIMIT = 0.01
EXACT = ["optimizer.moments=fp32", "optimizer.master=bf16+16"]
RUNS = {
    BASELINE: ["recipe.name=bf16", *EXACT],
    "default": [],
    "paper": ["recipe.name=paper", "optimizer.moments=fp8"],
    "leanest": ["recipe.name=leanest"],
    "e4m3": ["recipe.grad_format=e4m3"],
    "block": ["recipe.linear_scaling=block"],  # 1x128 scales; its products take E4M3 gradients only
    # Which part of a difference comes from the layers, and which from the optimizer.
    "default-fp32": EXACT,
    "paper-fp32": ["recipe.name=paper", *EXACT],
    "bf16-8bit": ["recipe.name=bf16"],
    "bf16-fp8": ["recipe.name=bf16", "optimizer.moments=fp8"],
    "bf16-head": ["recipe.name=bf16", "recipe.head=bf16", *EXACT],
    "default-logits": ["recipe.head=none"],
    # What BF16 layers lose themselves. TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 makes it bearable.
    "fp32": ["recipe.name=bf16", "model.dtype=float32", "optimizer.moments=fp32"],
}
USUAL_RUNS = [BASELINE, "default", "paper", "leanest", "e4m3", "block"]


def configured(path: Path, settings: list[str], tokens: int | None) -> Config:
    """The configuration of a run of at least `tokens` tokens, or as long as the file says."""
    config = load_config(path, settings)
    return config if tokens is None else scaled(path, settings, steps_for(config, tokens))


def run_all(arguments: argparse.Namespace) -> None:
    """Every run of every seed, one after the other."""
    console = Console(stderr=True)
    for run in planned(arguments, RUNS):
        config = configured(arguments.config, run.settings, arguments.tokens)
        row = train(config, shared_corpus(config, console), run.title, console)
        write_row(
            arguments.out, {"benchmark": "training", "kind": "run", **run.identity, "steps": config.train.steps, **row}
        )
        console.print(
            f"{run.title}: held-out loss {row['held_out_loss']:.4f} after {row['seconds']:.0f} s", highlight=False
        )


def prepare(arguments: argparse.Namespace) -> None:
    """Tokenize, and say how often the longest run would see each token."""
    console = Console(stderr=True)
    run = next(planned(arguments, RUNS))
    config = configured(arguments.config, run.settings, arguments.tokens)
    epoch = epoch_tokens(shared_corpus(config, console))
    assert epoch is not None  # data.streaming keeps no tokens, and open_corpus found some
    needed = config.train.steps * config.train.rows_per_step * config.data.sequence_length
    print(f"{epoch / 1e6:.1f} M tokens to train on; a run sees {needed / 1e6:.1f} M: {needed / epoch:.2f} epochs")


def report(rows: list[Row], figures: Path) -> None:
    """Print the tables of every length and draw its curves."""
    for runs in comparable(rows):
        print(training_text(runs, BASELINE, LOSS_LIMIT))
        name = f"training-{runs[0]['num_tokens'] / 1e6:.0f}m.png"
        draw_curves(runs, BASELINE, LOSS_LIMIT, figures / name)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, RUNS, USUAL_RUNS, "training.jsonl")
    parser.add_argument("--tokens", type=int, help="length of a run; default: the config file's")
    parser.add_argument("--prepare", action="store_true", help="tokenize and train nothing")
    chosen = parser.parse_args(arguments)
    if chosen.prepare and chosen.data is None:
        parser.error("--prepare needs --data: a temporary folder would be gone before the runs")
    return chosen


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for, then report all rows of --out."""
    arguments = parse(argv)
    if arguments.prepare:
        prepare(arguments)
        return
    if not arguments.report:
        run_all(arguments)
    report(read_rows(arguments.out, "run"), arguments.figures)


if __name__ == "__main__":
    main()
