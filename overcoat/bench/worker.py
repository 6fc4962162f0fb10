"""A child process that measures, so that what one measurement does to its process hides no other.

Peers bring kernels of their own. One that writes out of bounds takes the CUDA context with it, one may crash the
interpreter, one may never return; and what a failed step leaves allocated would be counted against the next. So the
measurements run in a child, one after the other, and a child in which one failed, or left memory behind, is replaced.
What runs out of memory in a child that has measured before is tried again in a new one: modules, workspaces and what
lies between allocations take a gigabyte there.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Callable

import torch

Figures = dict[str, Any]

OUT_OF_MEMORY = "out of memory"
# What may stay allocated between measurements: cuBLAS and attention workspaces.
LEFTOVER_BYTES = 128 * 2**20


class Worker:
    """Runs functions in a child process, started when needed. Use it as a context: leaving it ends the child."""

    def __init__(self) -> None:
        self._child: tuple[BaseProcess, Connection] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def call(self, function: Callable[..., Figures], *arguments: Any, timeout: float) -> Figures:
        """What `function(*arguments)` returns, or {"error": reason}.

        Args:
            function: importable by name; returns a dict of plain numbers and strings.
            timeout: seconds after which the child is killed.
        """
        is_new = self._child is None
        figures = self._call(function, arguments, timeout)
        if is_new or figures.get("error") != OUT_OF_MEMORY:
            return figures
        return self._call(function, arguments, timeout)

    def _call(self, function: Callable[..., Figures], arguments: tuple[Any, ...], timeout: float) -> Figures:
        if self._child is None:
            self._child = _start()
        process, pipe = self._child
        try:
            pipe.send((function, arguments))
            if not pipe.poll(timeout):
                self.close()
                return {"error": f"no result within {timeout:.0f} s"}
            figures, reusable = pipe.recv()
        except (EOFError, ConnectionError):
            process.join(10)
            code = process.exitcode
            self.close()
            return {"error": f"the process died: {_meaning(code)}"}
        if not reusable:
            self.close()
        return figures

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            process, pipe = self._child
            process.kill()
            process.join()
            pipe.close()
        self._child = None


def _start() -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()
    return process, mine


def attempt(function: Callable[..., Figures], *arguments: Any) -> Figures:
    """What `function(*arguments)` returns, or {"error": "Type: message"}, one line."""
    try:
        return function(*arguments)
    except Exception as error:
        # cuBLAS, cuDNN and extensions say it in words of their own.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return {"error": OUT_OF_MEMORY}
        text = " ".join(str(error).split())
        return {"error": f"{type(error).__name__}: {text}"[:300]}


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    os.dup2(2, 1)  # what peers print must not run into the table
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        figures = attempt(function, *arguments)
        pipe.send((figures, "error" not in figures and _is_clean()))


def _is_clean() -> bool:
    """Give all memory back; True if that is all of it and the device still answers."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.compiler.reset()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() < LEFTOVER_BYTES
    except RuntimeError:
        return False


def _meaning(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit status {code}"
