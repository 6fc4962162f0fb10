"""What the clock counts, on made-up CUDA events: every call takes a time that is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overcoat.bench import timing
from overcoat.bench.timing import host_ms, steady_ms, time_ms


class Device:
    """A clock in ms, and what was done on it in order."""

    def __init__(self) -> None:
        self.now, self.done = 0.0, list[str]()

    def work(self, name: str, ms: float) -> None:
        self.now += ms
        self.done.append(name)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = made.now

        def elapsed_time(self, end: Event) -> float:
            assert made.done[-1] == "synchronize"
            return end.time - self.time

    class Flush:
        def zero_(self) -> None:
            made.work("flush", 7.0)

    def empty(size: int, dtype: torch.dtype, device: str) -> Any:
        assert (dtype, device) == (torch.int8, "cuda")
        assert size >= 128 * 2**20  # more than any cache
        return Flush()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: made.work("lead", 0.6), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.work("synchronize", 0.0))
    monkeypatch.setattr(torch, "empty", empty)
    return made


def test_each_run_alone_with_cold_caches(device: Device) -> None:
    """The first calls compile and choose: they are left out, and so are flush and lead."""
    times = iter([100.0, 50.0, 3.0, 1.0, 2.0])
    found = time_ms(lambda: device.work("run", next(times)), repeats=3, warmup=2)
    assert found == pytest.approx({"ms": 2.0, "p20": 1.0, "p80": 3.0})
    assert device.done == ["run"] * 2 + ["flush", "lead", "run"] * 3 + ["synchronize"]


def test_steps_one_right_after_the_other(device: Device) -> None:
    """Windows of two steps: 1 + 3, 5 + 5 and 2 + 4 ms; ms per step."""
    times = iter([100.0, 1.0, 3.0, 5.0, 5.0, 2.0, 4.0])
    found = steady_ms(lambda: device.work("step", next(times)), windows=3, steps=2, warmup=1)
    assert found == {"ms": 3.0, "p20": 2.0, "p80": 5.0}
    assert device.done == ["step"] * 7 + ["synchronize"]


def test_the_host_alone_while_the_device_is_busy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's lead is queued before the host's clock starts, and what was queued is done before the next."""
    times = iter([9.0, 2.0, 3.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: device.now * 1e-3)
    assert host_ms(lambda: device.work("step", next(times)), repeats=3) == pytest.approx(3.0)
    assert device.done == ["synchronize", "lead", "step"] * 3 + ["synchronize"]


@pytest.mark.gpu
def test_a_known_time_on_this_gpu() -> None:
    """Ten times the cycles take ten times as long, wherever the clock stands."""
    short, long = (time_ms(lambda n=n: torch.cuda._sleep(n), repeats=5)["ms"] for n in (10**6, 10**7))
    assert long / short == pytest.approx(10, rel=0.2)


@pytest.mark.gpu
def test_what_the_host_waits_for_is_not_its_own() -> None:
    """A step that only queues work returns at once, one that waits takes the device's time."""
    work = torch.zeros(1, device="cuda")
    assert host_ms(lambda: work.add_(1), repeats=3) < 5.0
    assert host_ms(lambda: work.add_(1).item(), repeats=3) > 10.0
