"""The tables of COAT (arXiv 2410.19313), the paper's figures beside this machine's.

    python -m benchmarks paper list                              what there is, and what can run here
    python -m benchmarks paper table2                            the small size: seconds, without a GPU
    python -m benchmarks paper table1 --checkpoint runs/fp32     of a run that kept its moments in FP32

Everything is measured by the project's own tools: benchmarks layer and model, overcoat estimate, train and eval.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.paper import memory, states, training
from benchmarks.rows import Column, append_row, heading, line, significant
from overcoat.train.loop import RunStoppedError, UnreadableDataError
from overcoat.train.out_of_memory import DoesNotFitError

# What makes a table, and what its full size takes, "" for nothing more than the small one.
TABLES = {
    "table1": (states.table1, "--checkpoint RUN_DIR, a run with optimizer.moments=fp32"),
    "table2": (memory.table2, ""),
    "table3": (training.table3, "an NVIDIA GPU, minutes to hours (--set train.steps=N)"),
    "table6": (memory.table6, "an NVIDIA GPU, minutes"),
    "table7": (memory.table7, "a minute, and a GPU for speed"),
    "table8": (states.table8, "--checkpoint RUN_DIR, a run with optimizer.moments=fp32"),
}


def add_arguments(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of the tables."""
    tables = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    tables.add_parser("list", help="what there is, and what can run here")
    for name, (make, needs) in TABLES.items():
        table = tables.add_parser(name, help=make.__doc__, description=make.__doc__)
        if "--checkpoint" in needs:
            table.add_argument("--checkpoint", type=Path, metavar="RUN_DIR", help="default: a tiny model, made here")
        elif needs:
            table.add_argument("--full", action="store_true", help=f"needs {needs}; default: seconds on a CPU")
        if make is training.table3:
            training.add_arguments(table)
    return [*tables.choices.values()]


def run(parsed: argparse.Namespace) -> int:
    if parsed.table == "list":
        for name, (make, needs) in TABLES.items():
            print(f"{name}  {make.__doc__}\n        small: seconds on a CPU{f'; full: {needs}' if needs else ''}")
        return 0
    if parsed.table in ("table3", "table6") and parsed.full and not torch.cuda.is_available():
        raise ValueError(f"{parsed.table} --full needs {TABLES[parsed.table][1]}")
    try:
        title, rows, columns, notes = TABLES[parsed.table][0](parsed)
    except (RunStoppedError, DoesNotFitError, UnreadableDataError) as error:
        again = f"; the same command goes on with what {parsed.dir} holds" if parsed.dir else ""
        raise ValueError(f"{error}{again}") from error
    for row in rows:
        append_row(parsed.json, {"exhibit": parsed.table, **row})
    shown = [Column(key, key, significant) for key in columns]
    print("\n".join([heading(title, shown), *(line(row, shown) for row in rows), *notes]))
    return 0
