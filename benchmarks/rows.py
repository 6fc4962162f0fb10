"""Rows of results: as JSON lines, as aligned text, each line printed as soon as it is measured, and as bars.

A JSON line says when, where, with what and by which command its figures were measured:

    {"date": ..., "commit": ..., "gpu": ..., "torch": ..., "triton": ..., "peers": {...}, "command": ..., figures ...}

`date` is when the process began, so the rows of one run, whose ratios count, can be told from those of another.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch

from overcoat.extras import drawing, load_extra
from overcoat.kernels.language import triton
from overcoat.version import VERSION

Row = dict[str, Any]

# Distributions whose version can change a result: the models' library and the peers.
PACKAGES = (
    "transformers",
    "torchao",
    "flashoptim",
    "bitsandbytes",
    "galore_torch",
    "transformer_engine",
    "liger_kernel",
)
# Options that name a file to write; where it lies says nothing about the result.
FILE_OPTIONS = ("--json", "--plot", "--out")
ROOT = Path(__file__).resolve().parents[1]
_STARTED = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def environment(command: str | None = None) -> Row:
    """Return the environment of a row: date, commit, GPU, versions; `command` is this process's own unless given."""
    return {
        "date": _STARTED,
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", "none"),
        "peers": installed_versions(),
        "command": command or command_line(*_own_command()),
    }


def append_row(path: Path, figures: Row, where: Row | None = None) -> None:
    """Append `figures`, after `where` or this process's `environment()`, to a JSON-lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**(environment() if where is None else where), **figures}) + "\n")


def commit() -> str:
    """OVERCOAT_COMMIT if set, else the checkout's commit ("-dirty" if changed), else the installed version."""
    if told := os.environ.get("OVERCOAT_COMMIT"):
        return told
    # Installed into an environment inside somebody's repository, that repository's commit would be the answer.
    if _git("rev-parse", "--show-toplevel") == str(ROOT):
        return _git("describe", "--always", "--dirty") or f"overcoat {VERSION}"
    return f"overcoat {VERSION}"


def installed_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def command_line(program: str, arguments: Sequence[str]) -> str:
    """The command as a user types it, without this machine's directories."""
    words = [program]
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        option, equals, value = argument.partition("=")
        if previous in FILE_OPTIONS or Path(argument).is_absolute():
            argument = Path(argument).name
        elif equals and (option in FILE_OPTIONS or Path(value).is_absolute()):
            argument = f"{option}={Path(value).name}"
        words.append(shlex.quote(argument))
    return " ".join(words)


def _own_command() -> tuple[str, list[str]]:
    script = Path(sys.argv[0])
    is_module = script.suffix == ".py" and (script.parent / "__init__.py").is_file()
    return f"python -m {script.parent.name}.{script.stem}" if is_module else script.name, sys.argv[1:]


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


# ---- for people ------------------------------------------------------------------------------------------------------

NAME_WIDTH = 40
BAR_INCHES = 0.28


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


class Metric(NamedTuple):
    """Panel of bars: its title, the keys whose figures are stacked into one bar, their scale, decimals."""

    title: str
    keys: tuple[str, ...]
    scale: float = 1.0
    digits: int = 1


def check_plot(path: Path | None) -> None:
    """ValueError for an image that could not be written after the hours before it."""
    if path is not None:
        backend = load_extra("matplotlib.figure", "hf", "--plot")
        kinds = backend.Figure().canvas.get_supported_filetypes()
        kind = path.suffix.removeprefix(".")
        if kind not in kinds:
            raise ValueError(f"--plot {path}: an image ends with one of .{', .'.join(sorted(kinds))}")


def bar_chart(path: Path, title: str, rows: Sequence[Row], metrics: Sequence[Metric]) -> None:
    """Draw the rows that have figures into an image file, grouped by their "group"; ours have "overcoat" in the name.
    ValueError: matplotlib is not installed, or no row has figures."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if all(row.get(key) is not None for metric in metrics for key in metric.keys):
            groups.setdefault(row["group"], []).append(row)
    if not groups:
        raise ValueError(f"--plot {path.name}: nothing was measured, so there is nothing to draw")
    counts = [len(members) for members in groups.values()]
    size = (5.5 * len(metrics), 0.9 * len(groups) + BAR_INCHES * sum(counts) + 0.5)
    grid: dict[str, Any] = {"nrows": len(groups), "ncols": len(metrics), "height_ratios": counts, "squeeze": False}
    with drawing(path, "hf", "--plot", *size, **grid) as axes:
        for panels, (name, members) in zip(axes, groups.items(), strict=True):
            for panel, metric in zip(panels, metrics, strict=True):
                _draw_panel(panel, members, metric)
                panel.set_title(f"{name}: {metric.title}", fontsize=9)
            for panel in panels[1:]:
                panel.set_yticklabels([])
        axes[0, 0].figure.suptitle(title, fontsize=10)


def _draw_panel(panel: Any, rows: Sequence[Row], metric: Metric) -> None:
    places, left = range(len(rows)), [0.0] * len(rows)
    colors = ["tab:blue" if "overcoat" in row["name"] else "tab:gray" for row in rows]
    for shade, key in enumerate(metric.keys):
        widths = [row[key] * metric.scale for row in rows]
        bars = panel.barh(places, widths, left=left, color=colors, alpha=1.0 - 0.4 * shade)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    panel.bar_label(bars, [f"{value:,.{metric.digits}f}" for value in left], padding=2, fontsize=7)
    panel.set_yticks(places, [row["name"] for row in rows], fontsize=7)
    panel.tick_params(axis="x", labelsize=7)
    panel.set_xlim(0, max(left) * 1.15 or 1.0)
    panel.invert_yaxis()
