"""Results as aligned text, each line printed as soon as it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from overcoat.bench.rows import Row

NAME_WIDTH = 40


class Column(NamedTuple):
    """A column of numbers: its title, the key of the figure in a row, how it is written."""

    title: str
    key: str
    write: Callable[[Any], str]

    @property
    def width(self) -> int:
        return max(len(self.title), 8)


def decimals(digits: int, scale: float = 1.0) -> Callable[[Any], str]:
    """Write a number times `scale` with `digits` decimals."""
    return lambda value: f"{value * scale:,.{digits}f}"


def percent(value: Any) -> str:
    return f"{value:.0%}"


def heading(title: str, columns: Sequence[Column]) -> str:
    """The table's title and the titles of its columns, each over its numbers."""
    titles = "  ".join(column.title.rjust(column.width) for column in columns)
    return f"\n{title}\n{'':{NAME_WIDTH}s}  {titles}"


def line(row: Row, columns: Sequence[Column]) -> str:
    """One row: its name and numbers, "-" for a figure it lacks; or its name and why there are none."""
    name = f"{row['name']:{NAME_WIDTH}s}"
    if reason := row.get("absent") or row.get("error"):
        return f"{name}  {reason}"
    cells = (column.write(row[column.key]) if row.get(column.key) is not None else "-" for column in columns)
    return name + "  " + "  ".join(cell.rjust(column.width) for cell, column in zip(cells, columns, strict=True))
