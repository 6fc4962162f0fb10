"""The clock: CUDA events, with cold caches for single kernels and in steady state for whole steps; the host's time."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any, Callable

import torch

# Larger than any cache of today's GPUs.
FLUSH_BYTES = 256 * 2**20
# Keeps the GPU busy while Python queues the work, so that events time the device alone: about 0.6 ms.
LEAD_CYCLES = 1_000_000
# Longer than the host takes for a step of a few hundred launches: some 20 ms.
HOST_LEAD_CYCLES = 40_000_000


def time_ms(function: Callable[[], Any], repeats: int = 20) -> dict[str, float]:
    """Median, 20th and 80th percentile of the device time of `function`, in ms, each run with cold caches."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(3):
        function()
    pairs = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(LEAD_CYCLES)
        start = _mark()
        function()
        pairs.append((start, _mark()))
    torch.cuda.synchronize()
    return summary([start.elapsed_time(end) for start, end in pairs])


def steady_ms(step: Callable[[], Any], windows: int, steps: int = 1, warmup: int = 3) -> dict[str, float]:
    """Median, 20th and 80th percentile of ms per step over windows of `steps` steps, one right after the other. As in
    training the host runs ahead of the device as far as it can, and where it cannot, its time is what counts."""
    for _ in range(warmup):
        step()
    marks = [_mark()]
    for _ in range(windows):
        for _ in range(steps):
            step()
        marks.append(_mark())
    synchronize()
    return summary([a.elapsed_time(b) / steps for a, b in itertools.pairwise(marks)])


class _Moment:
    """In place of a CUDA event, where there is no GPU."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: _Moment) -> float:
        return (end.seconds - self.seconds) * 1e3


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else _Moment()
    event.record()
    return event


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_ms(step: Callable[[], Any], repeats: int = 9) -> float:
    """Median ms until `step` returns while the device is busy with something else: what the host takes to queue it. A
    core shared with another's work is 1.7 times as slow. A step that waits for the device takes 20 ms and more."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda._sleep(HOST_LEAD_CYCLES)
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def summary(times: list[float]) -> dict[str, float]:
    """{"ms": median, "p20", "p80"} of `times`."""
    times = sorted(times)
    return {"ms": statistics.median(times), "p20": times[len(times) // 5], "p80": times[(len(times) - 1) * 4 // 5]}


def copy_ms(moved: int, repeats: int = 20) -> float:
    """Median device time in ms of a copy that reads and writes `moved` bytes in all, rounded up to a multiple of 1024:
    one of an odd number of elements takes up to 3 us longer."""
    source = torch.empty(max(-(-moved // 1024), 1) * 256, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return time_ms(lambda: target.copy_(source), repeats)["ms"]
