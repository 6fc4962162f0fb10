"""One run of a benchmark: its measurements, printed and written as they come.

Every measurement has a process of its own, since contestants clash: a peer's kernel that writes out of bounds takes the
CUDA context with it, one may crash or never return, Transformer Engine keeps the FP8 state of all its modules,
torch.compile its graphs, and what one leaves allocated would be counted against the next.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import Column, Row, append_row, environment, heading, line
from benchmarks.timing import copy_ms

OUT_OF_MEMORY = "out of memory"


class Session:
    """Measures, prints the table and appends the rows to `--json`."""

    def __init__(self, parsed: argparse.Namespace, columns: Sequence[Column]) -> None:
        if not torch.cuda.is_available():
            raise ValueError(f"needs an NVIDIA GPU, and PyTorch {torch.__version__} sees none")
        self.parsed, self.columns = parsed, columns
        self.where = {"benchmark": parsed.tool, **call_alone(describe, timeout=parsed.timeout)}
        if "error" in self.where:
            raise ValueError(f"cannot use this GPU: {self.where['error']}")
        self.copy_rate = self.where["copy_TB_per_s"] * 1e12  # bytes per second, read and written
        say(", ".join(f"{name} {value}" for name, value in self.where.items() if name != "command"))

    def table(self, title: str, columns: Sequence[Column] | None = None) -> None:
        """Begin a table; its lines follow."""
        self.columns = columns or self.columns
        say(heading(title, self.columns))

    def run(
        self, name: str, function: Callable[..., Row], arguments: Sequence[Any], needs: Sequence[str], **labels: Any
    ) -> Row:
        """Measure `name` and add its row; packages that it needs and that are not installed are said in its line."""
        if missing := [package for package in needs if not is_installed(package)]:
            row = {**labels, "name": name, "absent": f"not installed: {', '.join(missing)}"}
            say(line(row, self.columns))
            return row
        return self.add({**labels, "name": name, **self.call(function, *arguments)})

    def everyone(
        self, needs: Mapping[str, Sequence[str]], function: Callable[..., Row], *arguments: Any, **labels: Any
    ) -> None:
        """`run` of (name, *arguments) for all that `--only` leaves in of the contestants; needs: packages, by name."""
        for name, packages in needs.items():
            if matches(name, self.parsed.only):
                self.run(name, function, (name, *arguments), packages, **labels)

    def call(self, function: Callable[..., Row], *arguments: Any) -> Row:
        """Return the result of `function(*arguments)` in a process of its own, or {"error": reason}."""
        return call_alone(function, *arguments, timeout=self.parsed.timeout)

    def add(self, row: Row) -> Row:
        """Append a measured row to the file and print it."""
        append_row(self.parsed.json, row, self.where)
        say(line(row, self.columns))
        return row


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """`--only` and `--timeout`, which every benchmark of contestants has."""
    words = "run only what has one of these words in its name; =WORD: what has exactly this name"
    parser.add_argument("--only", nargs="+", metavar="WORD", help=words)
    limit = "give one measurement up after this long (default 400)"
    parser.add_argument("--timeout", type=float, default=400.0, metavar="SECONDS", help=limit)


def describe() -> Row:
    """Return the run's environment and the rate at which the GPU copies 4 GiB, read and written bytes counted."""
    return {**environment(), "copy_TB_per_s": round(2**32 / copy_ms(2**32, repeats=10) / 1e9, 3)}


def is_installed(package: str) -> bool:
    """True if `import package` would find it; only its parents are imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def matches(name: str, words: Sequence[str] | None) -> bool:
    """True if `name` has one of `words` in it, or is the word after a "=", or if there are no words."""
    name = name.lower()
    return not words or any(
        name == word[1:].lower() if word.startswith("=") else word.lower() in name for word in words
    )


def say(text: str) -> None:
    print(text, flush=True)


# ---- a process for each measurement ----------------------------------------------------------------------------------


def call_alone(function: Callable[..., Row], *arguments: Any, timeout: float) -> Row:
    """Run `function(*arguments)`, importable by name, in a new process; return its dict of plain numbers and strings,
    or {"error": reason}. timeout: seconds after which the process is killed."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(timeout) else {"error": f"no result within {timeout:.0f} s"}
    except EOFError:
        process.join(10)
        code = process.exitcode
        died = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        return {"error": f"the process died: {died}"}
    finally:
        process.kill()
        process.join()
        mine.close()


def _answer(pipe: Connection, function: Callable[..., Row], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    os.dup2(2, 1)  # what peers print must not run into the table
    load_pytorchs_cudnn()
    pipe.send(attempt(function, *arguments))


def load_pytorchs_cudnn() -> None:
    """Load all parts of the cuDNN that PyTorch has loaded: where the machine has one of its own as well, PyTorch or
    Transformer Engine may be given a part of that later, and parts of two releases refuse each other."""
    maps = Path("/proc/self/maps")
    found = re.search(r"/\S*(?=/libcudnn\.so)", maps.read_text()) if maps.exists() else None
    if found is not None:  # a PyTorch for CPUs has none
        os.environ.setdefault("CUDNN_HOME", found[0])
        for library in sorted(Path(found[0]).glob("libcudnn*.so.*")):
            ctypes.CDLL(str(library))


def attempt(function: Callable[..., Row], *arguments: Any) -> Row:
    """Return the result of `function(*arguments)`, or {"error": "Type: message"}, one line."""
    try:
        return function(*arguments)
    except Exception as error:
        # cuBLAS, cuDNN and extensions say it in words of their own.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return {"error": OUT_OF_MEMORY}
        text = " ".join(str(error).split())
        return {"error": f"{type(error).__name__}: {text}"[:300]}
