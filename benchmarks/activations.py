"""Codes for kept activations on those of a trained model: errors by layer and tensor (the paper's Figure 4).

    python -m benchmarks.activations                            train the 124M model for --steps in BF16, then look
    python -m benchmarks.activations --checkpoint FOLDER        look into a Hugging Face model instead
    python -m benchmarks.activations --report                   tables and figure of the newest row that is there

One forward and backward pass over --rows held-out rows, in the model's own precision, with probes on every decoder
layer (`activation_probes`): what each way of writing a tensor in 8 bits (`activation_codes`) loses of it, of the norm's
and the gated product's result, and of attention's gradients; and what FP8 loses of the output gradients. Then the time
of finding a maximum in one stage and in two (`maximum`), where there is a GPU.

Rows of benchmarks/results/activations.jsonl: "kind": "errors" or "maximum".
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from benchmarks.activation_probes import probe
from benchmarks.activation_report import draw_errors, errors_text, maximum_text
from benchmarks.common import RESULTS
from benchmarks.run_report import Row
from benchmarks.runs import BARE, CONFIG, ROOT, read_rows, scaled, shared_corpus, train, write_row
from overcoat.train.build import build_model, choose_device
from overcoat.train.config import Config
from overcoat.train.configfile import load_config
from overcoat.train.corpus import Corpus
from overcoat.train.data import make_batch
from overcoat.train.loss import summed_loss
from overcoat.train.state import TrainState

# The model to look into: BF16 layers, FP32 moments, exact FP32 weights.
PLAIN = ["recipe.name=bf16", "optimizer.moments=fp32", "optimizer.master=bf16+16"]
# A checkpoint brings its own tokenizer, and reads no more text than the held-out rows need.
LITTLE_TEXT = ["tokenizer.vocab_size=0", "data.max_bytes=20_000_000", "data.held_out=0.05"]
SHAPES = ((8192, 2048), (8192, 4096), (16384, 4096))


def look(model: nn.Module, corpus: Corpus, num_rows: int, device: torch.device) -> Row:
    """Every figure of one forward and backward pass over the first held-out rows."""
    rows = corpus.held_out[:num_rows]
    batch = make_batch(rows, corpus.eos, document_mask=False).to(device)
    model.train()
    results, loss = probe(model, lambda: summed_loss(model, batch) / batch.num_labels)
    return {
        "num_tokens": batch.input_ids.numel(),
        "loss": loss,
        "sqnr": results.sqnr,
        "peaks": results.peaks,
        "lost": results.lost,
    }


def look_at_trained(config: Config, arguments: argparse.Namespace, console: Console) -> Row:
    """Train the configured model, then look."""
    corpus = shared_corpus(config, console)
    found: Row = {}

    def visit(state: TrainState, _say: Callable[[str], None]) -> None:
        found.update(look(state.model, corpus, arguments.rows, state.device))

    row = train(config, corpus, "BF16", console, visit)
    identity = {"model": arguments.config.name, "steps": config.train.steps, "seed": config.train.seed}
    return {**identity, "data": row["data"], "held_out_loss": row["held_out_loss"], **found}


def look_at_checkpoint(config: Config, arguments: argparse.Namespace, console: Console) -> Row:
    """Load the checkpoint, then look."""
    corpus = shared_corpus(config, console)
    device = choose_device(config.train.device)
    model = build_model(config, corpus.tokenizer, device)
    return {"model": arguments.checkpoint.name, "data": corpus.identity, **look(model, corpus, arguments.rows, device)}


def run(arguments: argparse.Namespace) -> None:
    """Measure and append the rows."""
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        places = [f"train.run_dir={folder}", f"data.cache_dir={arguments.data or Path(folder) / 'data'}"]
        settings = [*BARE, *PLAIN, *arguments.set, f"eval.rows={arguments.rows}", *places]
        if arguments.checkpoint is None:
            row = look_at_trained(scaled(arguments.config, settings, arguments.steps), arguments, console)
        else:
            chosen = ["model.config={}", f"model.name={arguments.checkpoint}", *LITTLE_TEXT]
            row = look_at_checkpoint(load_config(arguments.config, [*settings, *chosen]), arguments, console)
    write_row(arguments.out, {"benchmark": "activations", "kind": "errors", **row})
    if torch.cuda.is_available():
        from benchmarks.maximum import time_maximum

        times = [{"tokens": tokens, "hidden": hidden, **time_maximum(tokens, hidden)} for tokens, hidden in SHAPES]
        write_row(arguments.out, {"benchmark": "activations", "kind": "maximum", "shapes": times})
    else:
        console.print("no GPU: the time of the maximum is left out")


def report(rows: list[Row], figures: Path) -> None:
    """Print the newest row of each kind and draw the errors."""
    errors = [row for row in rows if row["kind"] == "errors"]
    times = [row for row in rows if row["kind"] == "maximum"]
    if errors:
        print(errors_text(errors[-1]))
        draw_errors(errors[-1], figures / "activations.png")
    if times:
        print(maximum_text(times[-1]))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of training, with the schedule stretched to it")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder of a Llama-shaped model")
    parser.add_argument("--rows", type=int, default=32, help="held-out rows in the pass: a training batch")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="more settings")
    parser.add_argument("--data", type=Path, help="where tokens are kept; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS / "activations.jsonl")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs", help="folder of the image")
    parser.add_argument("--report", action="store_true", help="measure nothing, report what --out holds")
    return parser.parse_args(arguments)


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for, then report."""
    arguments = parse(argv)
    if not arguments.report:
        run(arguments)
    report(read_rows(arguments.out), arguments.figures)


if __name__ == "__main__":
    main()
