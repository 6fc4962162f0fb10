"""One run of a benchmark: its child process, its environment, its rows, printed and written as they come."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch

from overcoat.bench.output import Column, Metric, bar_chart, heading, line
from overcoat.bench.rows import Row, append_row, command_line, environment
from overcoat.bench.timing import copy_bandwidth
from overcoat.bench.worker import Figures, Worker


class Case(NamedTuple):
    """One measurement: its name in the table, the function and its arguments, the packages it cannot do without."""

    name: str
    function: Callable[..., Figures]
    arguments: tuple[Any, ...]
    needs: tuple[str, ...] = ()


class Session:
    """Measures cases, prints the table and appends the rows to `--json`. A context: leaving it ends the child."""

    def __init__(
        self, benchmark: str, parsed: argparse.Namespace, columns: Sequence[Column], needs: Sequence[str] = ()
    ) -> None:
        require_gpu(benchmark)
        require_packages(benchmark, [*needs, *(["matplotlib"] if getattr(parsed, "plot", None) else [])])
        self.parsed, self.columns = parsed, columns
        self.drawn: list[Row] = []
        self.worker = Worker()
        described = self.worker.call(describe, command_line("overcoat", parsed.argv), timeout=parsed.timeout)
        if "error" in described:
            self.worker.close()
            raise ValueError(f"overcoat bench cannot use this GPU: {described['error']}")
        self.where = {"benchmark": benchmark, **described}
        versions = ", ".join(f"{name} {version}" for name, version in described["peers"].items())
        say(
            f"{described['gpu']}, device copy {described['copy_TB_per_s']:.2f} TB/s, torch {described['torch']}, "
            f"triton {described['triton']}, {versions}, commit {described['commit']}"
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.worker.close()

    @property
    def copy_rate(self) -> float:
        """Bytes per second of a device-to-device copy, read and written."""
        return self.where["copy_TB_per_s"] * 1e12

    def table(self, title: str, columns: Sequence[Column] | None = None) -> None:
        """Begin a table; its lines follow."""
        self.columns = columns or self.columns
        say(heading(title, self.columns))

    def wants(self, name: str) -> bool:
        """Whether `--only` leaves `name` in."""
        return matches(name, self.parsed.only)

    def run(self, case: Case, **labels: Any) -> Row:
        """Measure one case and add its row; a package it needs and that is not installed is said in its line."""
        missing = [package for package in case.needs if not is_installed(package)]
        if missing:
            row = {**labels, "name": case.name, "absent": f"not installed: {', '.join(missing)}"}
            say(line(row, self.columns))
            return row
        figures = self.worker.call(case.function, *case.arguments, timeout=self.parsed.timeout)
        return self.add({**labels, "name": case.name, **figures})

    def add(self, row: Row) -> Row:
        """Print a measured row and append it to the file."""
        say(line(row, self.columns))
        if self.parsed.json:
            append_row(self.parsed.json, row, self.where)
        return row

    def draw(self, rows: Iterable[Row], group: str) -> None:
        """Keep rows for the plot, in a group of its own."""
        self.drawn += [{**row, "group": group} for row in rows]

    def plot(self, metrics: Sequence[Metric]) -> None:
        """Write `--plot`, if asked for."""
        if self.parsed.plot:
            where = self.where
            title = f"{where['gpu']}, torch {where['torch']}, {where['date'][:10]}, commit {where['commit']}"
            bar_chart(self.parsed.plot, title, self.drawn, metrics)


def add_common_arguments(parser: argparse.ArgumentParser, timeout: float = 300.0) -> None:
    """Options of every benchmark."""
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="run only what has one of these words in its name; =WORD: what has exactly this name",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="append one JSON line per result")
    parser.add_argument(
        "--timeout",
        type=float,
        default=timeout,
        metavar="SECONDS",
        help=f"give one measurement up after this long (default {timeout:.0f})",
    )


def add_plot_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="PATH.png", help="draw the results as bars (needs matplotlib)")


def require_gpu(benchmark: str) -> None:
    """ValueError where nothing can be measured."""
    if not torch.cuda.is_available():
        raise ValueError(f"overcoat bench {benchmark} needs an NVIDIA GPU, and PyTorch {torch.__version__} sees none")


def require_packages(benchmark: str, packages: Sequence[str]) -> None:
    """ValueError if one of the extra `bench` is not installed: said before, not after, all is measured."""
    for package in packages:
        if not is_installed(package):
            raise ValueError(
                f"overcoat bench {benchmark} needs the package {package!r} for this: pip install 'overcoat[bench]'"
            )


def describe(command: str) -> Figures:
    """The run's environment and the GPU's copy bandwidth."""
    return {**environment(command), "copy_TB_per_s": round(copy_bandwidth() / 1e12, 3)}


def is_installed(package: str) -> bool:
    """Whether `import package` would find it; nothing but its parents is imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def matches(name: str, words: Sequence[str] | None) -> bool:
    """Whether `name` has one of `words` in it, or is the word after a "="; without words, always."""
    if not words:
        return True
    name = name.lower()
    return any(name == word[1:].lower() if word.startswith("=") else word.lower() in name for word in words)


def say(text: str) -> None:
    print(text, flush=True)
