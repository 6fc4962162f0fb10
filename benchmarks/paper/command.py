"""The tables and figures of COAT (arXiv 2410.19313), the paper's figures beside this machine's.

    python -m benchmarks paper list                        what there is, and what can run here
    python -m benchmarks paper table2                      the small size: seconds, mostly without a GPU
    python -m benchmarks paper table1 --size full --checkpoint runs/fp32 --json table1.jsonl --plot table1.png

Everything is measured by the project's own tools: layer, model, `overcoat` estimate, train, eval.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.paper import activations, memory, states, training, vision
from benchmarks.paper.result import Exhibit, plot, table
from benchmarks.rows import append_row, check_plot
from overcoat.train.loop import RunStoppedError, UnreadableDataError
from overcoat.train.out_of_memory import DoesNotFitError

CHECKPOINT = "a run with optimizer.moments=fp32: --checkpoint RUN_DIR"
HOURS = "minutes to hours; --set train.steps=N"
SECONDS = "tiny model, seconds"
# Of what a run has left, and of trainings.
of_run = functools.partial(Exhibit, small=SECONDS, needs=CHECKPOINT, checkpoint=True)
trained = functools.partial(Exhibit, needs=HOURS, gpu=True)
EXHIBITS = {
    "table1": of_run("errors of FP8 moments, with and without expansion", states.table1),
    "table2": Exhibit("bytes a block keeps, by op", memory.table2, "dry runs, seconds"),
    "table3": trained("pretraining OLMo-1B: losses and tasks", training.table3, "tiny, three arms"),
    "table4": trained("fine-tuning on mathematics: exact match", training.table4, "tiny, four arms"),
    "table5": trained("a vision-language model, by kind of question", vision.table5, "tiny, three arms"),
    "table6": Exhibit("a block's time and kept bytes", memory.table6, "kept bytes, dry runs", "minutes", gpu=True),
    "table7": Exhibit(
        "memory and speed of whole models", memory.table7, "7B, dry run", "a minute of dry runs; speed on a GPU"
    ),
    "table8": of_run("errors of moments with dynamic exponents", states.table8),
    "figure2": of_run("range of groups of moments and k", states.figure2),
    "figure3": of_run("which FP8 codes occur (with figure 9)", states.figure3),
    "figure9": of_run("which FP8 codes occur, as figure 3", states.figure3),
    "figure4a": of_run("error of kept activations by granularity", activations.figure4a),
    "figure4b": Exhibit("time of a maximum, one and two stages", activations.figure4b, "", "seconds", gpu=True),
    "figure5": trained("loss curves of OLMo-1B (table3)", training.table3, "tiny, three arms"),
    "figure6": trained("loss curves of OLMo-7B", training.table3, "tiny, three arms"),
    "figure7": trained("loss curves of the VLM (table5)", vision.table5, "tiny, three arms"),
    "figure8": trained("loss curves of fine-tuning (table4)", training.table4, "tiny, four arms"),
}
# What an exhibit reads of the options that not all do; and what these are when they are left out.
READ: dict[Any, tuple[str, ...]] = {
    training.table3: ("config", "set", "arms", "seeds", "dir", "tasks"),
    training.table4: ("model", "config", "set", "arms", "seeds", "dir"),
    vision.table5: ("set", "arms", "seeds", "dir"),
}
LEFT_OUT: dict[str, Any] = {"set": [], "seeds": [0], "tasks": []}
OPTIONS = ("checkpoint", "model", "config", "set", "arms", "seeds", "dir", "tasks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("exhibit", choices=["list", *EXHIBITS], metavar="EXHIBIT", help=f"list, {', '.join(EXHIBITS)}")
    parser.add_argument("--size", choices=("small", "full"), default="small", help="default small")
    parser.add_argument("--checkpoint", type=Path, metavar="RUN_DIR", help="a run to look at, for --size full")
    parser.add_argument("--model", metavar="NAME|PATH", help="table4: fine-tune this instead of a model of its own")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="table3, table4: pretrain this instead")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings of every arm")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="of a training, these alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the arms (default 0)")
    parser.add_argument("--dir", type=Path, help="keep the runs there, and go on with what is there")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="table3: of overcoat eval")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per row")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")


def lacking(exhibit: Exhibit, size: str, checkpoint: Path | None) -> str:
    """Return what an exhibit needs and this machine lacks; "" if it can run."""
    if size == "small" and exhibit.small:
        return ""
    if exhibit.gpu and not torch.cuda.is_available():
        return f"an NVIDIA GPU ({exhibit.needs})"
    return exhibit.needs if exhibit.checkpoint and checkpoint is None else ""


def check_read(exhibit: Exhibit, parsed: argparse.Namespace) -> None:
    """ValueError for an option that was given and would not be read."""
    read = {*READ.get(exhibit.run, ()), *(["checkpoint"] if exhibit.checkpoint else [])}
    # A tiny model takes their place, or the model that is named.
    replaced = {"checkpoint", "config"} if parsed.size == "small" else {"config"} if parsed.model else set()
    for name in OPTIONS:
        if getattr(parsed, name) != LEFT_OUT.get(name) and name not in read - replaced:
            remedy = ", or give --size full" if parsed.size == "small" and name in read else ""
            what = f"paper {parsed.exhibit} --size {parsed.size}"
            raise ValueError(f"{what} does not read --{name}: leave it out{remedy}")


def run(parsed: argparse.Namespace) -> int:
    if parsed.exhibit == "list":
        print(listing())
        return 0
    exhibit = EXHIBITS[parsed.exhibit]
    if needs := lacking(exhibit, parsed.size, parsed.checkpoint):
        raise ValueError(f"paper {parsed.exhibit} --size {parsed.size} needs {needs}")
    check_read(exhibit, parsed)
    check_plot(parsed.plot)
    try:
        result = exhibit.run(parsed)
    except RunStoppedError as stop:
        again = f"the same command goes on with what {parsed.dir} holds" if parsed.dir else "--dir would have kept it"
        print(f"benchmarks paper: {signal.Signals(stop.signum).name}: stopped; {again}", file=sys.stderr)
        return 128 + stop.signum
    except (DoesNotFitError, UnreadableDataError) as error:
        raise FloatingPointError(str(error)) from error  # "training failed"
    for row in result.rows if parsed.json else ():
        append_row(parsed.json, {"exhibit": parsed.exhibit, "size": parsed.size, **row})
    if parsed.plot:
        plot(result, parsed.plot)
    print(table(result))  # last: the reader of a pipe may be gone
    return 0


def listing() -> str:
    """Every exhibit, and the state of both sizes on this machine."""
    lines = [f"{'':10s}{'what it shows':52s}{'--size small':36s}--size full"]
    for name, exhibit in EXHIBITS.items():
        states = []
        for size, runs in (("small", exhibit.small), ("full", exhibit.needs or "the same")):
            needs = lacking(exhibit, size, None)
            states.append(f"needs {needs}" if needs else f"runs here ({runs})")
        lines.append(f"{name:10s}{exhibit.shows:52s}{states[0]:36s}{states[1]}")
    return "\n".join(lines)
