"""The child process: what goes wrong in it is reported, and the next measurement runs."""

from __future__ import annotations

import operator
import signal
import time
from typing import Any

import pytest
import torch

from overcoat.bench import worker
from overcoat.bench.worker import OUT_OF_MEMORY, Worker, attempt


def test_a_crash_and_a_hang_hide_nothing() -> None:
    with Worker() as child:
        assert child.call(dict, [("ms", 1.5)], timeout=120) == {"ms": 1.5}
        assert child.call(signal.raise_signal, signal.SIGKILL, timeout=120) == {"error": "the process died: SIGKILL"}
        assert child.call(dict, [("ms", 2.5)], timeout=120) == {"ms": 2.5}
        started = time.monotonic()
        assert child.call(time.sleep, 60, timeout=1) == {"error": "no result within 1 s"}
        assert time.monotonic() - started < 30


class FakePipe:
    """Answers as a child would."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.closed = answer, False

    def send(self, _task: Any) -> None:
        pass

    def poll(self, _timeout: float) -> bool:
        return True

    def recv(self) -> Any:
        return self.answer

    def close(self) -> None:
        self.closed = True


class FakeProcess:
    def kill(self) -> None:
        pass

    def join(self) -> None:
        pass


def children(monkeypatch: pytest.MonkeyPatch, pipes: list[FakePipe]) -> list[FakePipe]:
    """Give each new child the next of `pipes`; those that were given so far."""
    started: list[FakePipe] = []

    def start() -> Any:
        started.append(pipes[len(started)])
        return FakeProcess(), started[-1]

    monkeypatch.setattr(worker, "_start", start)
    return started


@pytest.mark.parametrize("reusable", [True, False])
def test_a_child_that_is_not_clean_is_replaced(monkeypatch: pytest.MonkeyPatch, reusable: bool) -> None:
    pipes = [FakePipe(({"ms": 1}, reusable)), FakePipe(({"ms": 2}, True))]
    started = children(monkeypatch, pipes)
    child = Worker()
    assert child.call(dict, timeout=1) == {"ms": 1}
    assert pipes[0].closed is not reusable
    assert child.call(dict, timeout=1) == {"ms": 1 if reusable else 2}
    child.close()
    assert all(pipe.closed for pipe in started)


def test_what_runs_out_of_memory_is_tried_again_where_nothing_is_left_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = {"error": OUT_OF_MEMORY}
    pipes = [FakePipe(({"ms": 1}, True)), FakePipe(({"ms": 2}, True)), FakePipe((full, False)), FakePipe(({}, True))]
    started = children(monkeypatch, pipes)
    child = Worker()
    assert child.call(dict, timeout=1) == {"ms": 1}
    pipes[0].answer = (full, False)  # the second measurement in this child
    assert child.call(dict, timeout=1) == {"ms": 2}
    assert (pipes[0].closed, len(started)) == (True, 2)
    child.close()
    assert child.call(dict, timeout=1) == full  # the first one in its child
    assert len(started) == 3


def test_errors_become_one_line() -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("first\n  second " + "x" * 1000)

    assert attempt(operator.truediv, 1, 0) == {"error": "ZeroDivisionError: division by zero"}
    error = attempt(fail)["error"]
    assert error.startswith("RuntimeError: first second xxx")
    assert len(error) == 300


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("cuDNN: Out of memory, 3 GiB")])
def test_running_out_of_memory_has_one_name(error: Exception) -> None:
    def fail() -> dict[str, Any]:
        raise error

    assert attempt(fail) == {"error": OUT_OF_MEMORY}
