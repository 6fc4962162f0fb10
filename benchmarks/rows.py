"""Rows of results: as JSON lines, and as aligned text, each line printed as soon as it is measured.

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

from overcoat.kernels.language import triton
from overcoat.version import VERSION

Row = dict[str, Any]
Result = tuple[str, list[Row], tuple[str, ...], tuple[str, ...]]  # title, rows, keys of the columns, notes

ROOT = Path(__file__).resolve().parents[1]
# Their versions can change a result, as that of transformers.
PEERS = (
    *("torchao", "flashoptim", "bitsandbytes", "galore_torch", "transformer_engine", "liger_kernel"),
    *("flash_linear_attention", "muon_optimizer", "sdnq", "adv_optm"),
)
_STARTED = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def environment() -> Row:
    """Return the environment of a row: date, commit, GPU, versions, this process's command."""
    peers = {}
    for name in ("transformers", *PEERS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            peers[name] = importlib.metadata.version(name)
    return {
        "date": _STARTED,
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", "none"),
        "peers": peers,
        "command": command_line(sys.argv[1:]),
    }


def append_row(path: Path | None, figures: Row, where: Row | None = None) -> None:
    """Append `figures`, after `where` or this process's `environment()`, to a JSON-lines file, if there is one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**(environment() if where is None else where), **figures}) + "\n")


def commit() -> str:
    """OVERCOAT_COMMIT if set, else the checkout's commit ("-dirty" if changed), else the package's version."""
    if told := os.environ.get("OVERCOAT_COMMIT"):
        return told
    # A copy without .git may lie in another repository, whose commit would be the answer.
    git = ["git", "-C", str(ROOT), "--git-dir", str(ROOT / ".git"), "--work-tree", str(ROOT)]
    found = ""
    with contextlib.suppress(OSError):
        found = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout
    return found.strip() or f"overcoat {VERSION}"


def command_line(arguments: Sequence[str]) -> str:
    """Return the command as a user types it, without this machine's directories."""
    words = ["python -m benchmarks"]
    for argument in arguments:
        option, equals, value = argument.rpartition("=")
        words.append(shlex.quote(f"{option}{equals}{Path(value).name if Path(value).is_absolute() else value}"))
    return " ".join(words)


# ---- for people ------------------------------------------------------------------------------------------------------

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


def significant(value: Any) -> str:
    """Four significant digits; words as they are."""
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


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
