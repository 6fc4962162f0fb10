"""Result of an exhibit: rows of figures, the paper's beside ours, as a table, JSON lines and a plot."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rows import Column, Metric, Row, bar_chart, heading, line
from overcoat.extras import drawing

Options = argparse.Namespace


class Result(NamedTuple):
    """columns: keys of the rows' figures, in order; each row has a "name" besides.

    curves: by name, y over x, for a plot of lines; without any the rows are drawn as bars. labels: of x and y.
    notes: what must be known to read the figures.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[Row]
    notes: tuple[str, ...] = ()
    curves: Mapping[str, Mapping[float, float]] = {}
    labels: tuple[str, str] = ("", "")


class Exhibit(NamedTuple):
    """A table or figure of the paper.

    run: makes it. small: what it is at `--size small`, "" if a CPU cannot. needs: what `--size full` takes, "" for
    nothing; gpu: an NVIDIA GPU; checkpoint: a finished run.
    """

    shows: str
    run: Callable[[Options], Result]
    small: str = ""
    needs: str = ""
    gpu: bool = False
    checkpoint: bool = False


def significant(value: Any) -> str:
    """Four significant digits; words as they are."""
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(result: Result) -> str:
    columns = [Column(key, key, significant) for key in result.columns]
    return "\n".join([heading(result.title, columns), *(line(row, columns) for row in result.rows), *result.notes])


def plot(result: Result, path: Path) -> None:
    """Curves, or bars of all columns of numbers. ValueError: matplotlib is not installed, or there is nothing to
    draw."""
    if not result.curves:
        numbers = [key for key in result.columns if isinstance(result.rows[0].get(key), (int, float))]
        rows = [{**row, "group": result.title} for row in result.rows]
        bar_chart(path, result.title, rows, [Metric(key, (key,), digits=2) for key in numbers])
        return
    with drawing(path, "hf", "--plot", 8, 5) as axes:
        for name, points in result.curves.items():
            axes.plot([*points], [*points.values()], marker=".", linewidth=1, label=name)
        axes.set(title=result.title, xlabel=result.labels[0], ylabel=result.labels[1])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
