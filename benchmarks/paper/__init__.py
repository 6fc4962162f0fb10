"""The tables of COAT (arXiv 2410.19313), the paper's figures beside this machine's.

    python -m benchmarks paper list                              what there is
    python -m benchmarks paper table2                            dry runs: seconds, without a GPU
    python -m benchmarks paper table1 --checkpoint runs/fp32     of a run that kept its moments in FP32

Tables 3 to 5 compare trainings: `overcoat train` with [compare], and `overcoat eval` (docs/paper.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.paper import memory, states
from benchmarks.rows import Column, append_row, heading, line, significant

TABLES = {
    "table1": states.table1,
    "table2": memory.table2,
    "table6": memory.table6,
    "table7": memory.table7,
    "table8": states.table8,
}


def add_arguments(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of the tables."""
    tables = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    for name, make in [("list", print), *TABLES.items()]:
        summary = "what there is" if name == "list" else make.__doc__
        table = tables.add_parser(name, help=summary, description=summary)
        if name in ("table1", "table8"):
            table.add_argument("--checkpoint", type=Path, required=True, metavar="RUN_DIR", help="moments in FP32")
        elif name in ("table6", "table7"):
            table.add_argument("--full", action="store_true", help="every shape, and times, on an NVIDIA GPU")
    return [*tables.choices.values()]


def run(parsed: argparse.Namespace) -> int:
    if parsed.table == "list":
        print("\n".join(f"{name}  {make.__doc__}" for name, make in TABLES.items()))
        return 0
    title, rows, columns, notes = TABLES[parsed.table](parsed)
    for row in rows:
        append_row(parsed.json, {"exhibit": parsed.table, **row})
    shown = [Column(key, key, significant) for key in columns]
    print("\n".join([heading(title, shown), *(line(row, shown) for row in rows), *notes]))
    return 0
