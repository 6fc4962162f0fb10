"""`overcoat report`: one or several runs as one HTML page, which needs no network.

    overcoat report runs/demo
    overcoat report runs/a runs/b runs/c -o comparison.html

Losses, speed, memory, gradient norms and learning rates over the steps; the memory of a step by component; how FP8
operands use their range (train.fp8_every); what the configurations differ in; samples. A run of [compare] brings its
second run along.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from overcoat.extras import load_extra


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `overcoat report`."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: report.html")
    parser.set_defaults(function=run)


def run(parsed: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    load_extra("rich", "hf", "overcoat report")
    from overcoat.report.page import page
    from overcoat.report.runs import read_runs

    text = page(read_runs(parsed.runs))
    Path(parsed.output).write_text(text, encoding="utf-8")
    print(f"{parsed.output} ({len(text.encode()) / 1000:,.0f} kB)")
    return 0
