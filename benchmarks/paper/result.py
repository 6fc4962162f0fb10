"""Result of an exhibit: rows of figures, the paper's beside ours, as a table and, of some, curves."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rows import Column, Row, heading, line
from overcoat.extras import drawing

Options = argparse.Namespace


class Result(NamedTuple):
    """columns: keys of the rows' figures, in order; each row has a "name" besides.

    curves: by name, losses by step, for `--plot`. notes: what must be known to read the figures.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[Row]
    notes: tuple[str, ...] = ()
    curves: Mapping[str, Mapping[float, float]] = {}


def significant(value: Any) -> str:
    """Four significant digits; words as they are."""
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(result: Result) -> str:
    columns = [Column(key, key, significant) for key in result.columns]
    return "\n".join([heading(result.title, columns), *(line(row, columns) for row in result.rows), *result.notes])


def plot(result: Result, path: Path) -> None:
    with drawing(path, "hf", "--plot", 8, 5) as axes:
        for name, points in result.curves.items():
            axes.plot([*points], [*points.values()], marker=".", linewidth=1, label=name)
        axes.set(title=result.title, xlabel="step", ylabel="nats per token")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
