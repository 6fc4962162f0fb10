"""The tables of COAT (arXiv 2410.19313), the paper's figures beside this machine's.

    python -m benchmarks paper list            what there is, and what can run here
    python -m benchmarks paper table2          the small size: seconds, mostly without a GPU
    python -m benchmarks paper table1 --size full --checkpoint runs/fp32 --json table1.jsonl

Everything is measured by the project's own tools: benchmarks layer and model, overcoat estimate, train and eval.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.paper import memory, states, training
from benchmarks.paper.result import Options, Result, plot, table
from benchmarks.rows import append_row
from overcoat.train.loop import RunStoppedError, UnreadableDataError
from overcoat.train.out_of_memory import DoesNotFitError


class Exhibit(NamedTuple):
    """A table of the paper.

    run: makes it. small: what it is at `--size small`. needs: what `--size full` takes, "" for nothing; gpu: an NVIDIA
    GPU. reads: options besides.
    """

    shows: str
    run: Callable[[Options], Result]
    small: str
    needs: str = ""
    gpu: bool = False
    reads: tuple[str, ...] = ()


OF_RUN = "tiny model, seconds", "a run with optimizer.moments=fp32: --checkpoint RUN_DIR", False, ("checkpoint",)
HOURS = "minutes to hours; --set train.steps=N"
ARMS = ("config", "set", "arms", "seeds", "dir", "tasks", "plot")
EXHIBITS = {
    "table1": Exhibit("errors of FP8 moments, with and without expansion", states.table1, *OF_RUN),
    "table2": Exhibit("bytes a block keeps, by op", memory.table2, "dry runs, seconds"),
    "table3": Exhibit("pretraining: losses, tasks", training.table3, "tiny, three arms", HOURS, True, ARMS),
    "table6": Exhibit("a block's time and kept bytes", memory.table6, "kept bytes, dry runs", "minutes", True),
    "table7": Exhibit("memory and speed of whole models", memory.table7, "7B, dry run", "a minute; speed on a GPU"),
    "table8": Exhibit("errors of moments with dynamic exponents", states.table8, *OF_RUN),
}
# Options that not every table reads, and what they are when they are left out.
OPTIONS: dict[str, Any] = {"set": [], "seeds": [0], "tasks": []}
OPTIONS |= dict.fromkeys(("checkpoint", "config", "arms", "dir", "plot"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("exhibit", choices=["list", *EXHIBITS], metavar="TABLE", help=f"list, {', '.join(EXHIBITS)}")
    parser.add_argument("--size", choices=("small", "full"), default="small", help="default small")
    parser.add_argument("--checkpoint", type=Path, metavar="RUN_DIR", help="a run to look at, for --size full")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="table3: pretrain this instead")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings of every arm")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="of a training, these alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the arms (default 0)")
    parser.add_argument("--dir", type=Path, help="keep the runs there, and go on with what is there")
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="table3: of overcoat eval")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss curves (needs matplotlib)")


def lacking(exhibit: Exhibit, size: str, checkpoint: Path | None) -> str:
    """Return what a table needs and this machine lacks; "" if it can run."""
    if size == "small":
        return ""
    if exhibit.gpu and not torch.cuda.is_available():
        return f"an NVIDIA GPU ({exhibit.needs})"
    return exhibit.needs if "checkpoint" in exhibit.reads and checkpoint is None else ""


def check_read(exhibit: Exhibit, parsed: argparse.Namespace) -> None:
    """ValueError for an option that was given and would not be read, or an image that could not be written."""
    # A tiny model takes their place.
    replaced = {"checkpoint", "config"} if parsed.size == "small" else set()
    for name, left_out in OPTIONS.items():
        read = name in exhibit.reads
        if getattr(parsed, name) != left_out and (not read or name in replaced):
            remedy = ", or give --size full" if parsed.size == "small" and read else ""
            raise ValueError(f"{parsed.exhibit} --size {parsed.size} does not read --{name}: leave it out{remedy}")
    if parsed.plot and parsed.plot.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--plot {parsed.plot}: an image ends with .png, .pdf or .svg")


def run(parsed: argparse.Namespace) -> int:
    if parsed.exhibit == "list":
        for name, exhibit in EXHIBITS.items():
            needs = lacking(exhibit, "full", None)
            full = f"needs {needs}" if needs else f"runs here ({exhibit.needs or 'the same'})"
            print(f"{name:8s}{exhibit.shows:52s}small: runs here ({exhibit.small}); full: {full}")
        return 0
    exhibit = EXHIBITS[parsed.exhibit]
    if needs := lacking(exhibit, parsed.size, parsed.checkpoint):
        raise ValueError(f"{parsed.exhibit} --size {parsed.size} needs {needs}")
    check_read(exhibit, parsed)
    try:
        result = exhibit.run(parsed)
    except (RunStoppedError, DoesNotFitError, UnreadableDataError) as error:
        again = f"; the same command goes on with what {parsed.dir} holds" if parsed.dir else ""
        raise ValueError(f"{error}{again}") from error
    for row in result.rows:
        append_row(parsed.json, {"exhibit": parsed.exhibit, "size": parsed.size, **row})
    if parsed.plot:
        plot(result, parsed.plot)
    print(table(result))
    return 0
