"""Schedules against their closed forms."""

from __future__ import annotations

import math

import pytest

from overcoat.train.config import ScheduleConfig
from overcoat.train.loop import multiplier


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_warmup_rises_linearly_to_the_peak(kind: str) -> None:
    schedule = ScheduleConfig(kind=kind, warmup_steps=4, final_ratio=0.1)  # type: ignore[arg-type]
    assert [multiplier(schedule, step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine() -> None:
    schedule = ScheduleConfig(kind="cosine", warmup_steps=10, final_ratio=0.2)
    assert multiplier(schedule, 60, 110) == pytest.approx(0.6)  # half-way between 1 and 0.2
    assert multiplier(schedule, 35, 110) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert multiplier(schedule, 110, 110) == pytest.approx(0.2)
    assert multiplier(schedule, 500, 110) == pytest.approx(0.2)  # never below, should a run be lengthened


def test_linear() -> None:
    schedule = ScheduleConfig(kind="linear", warmup_steps=0, final_ratio=0.0)
    assert [multiplier(schedule, step, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_wsd_is_flat_and_then_falls() -> None:
    schedule = ScheduleConfig(kind="wsd", warmup_steps=2, decay_steps=4, final_ratio=0.5)
    values = [multiplier(schedule, step, 10) for step in range(10)]
    assert values == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.875, 0.75, 0.625]


def test_wsd_decays_over_a_fifth_by_default() -> None:
    schedule = ScheduleConfig(kind="wsd", warmup_steps=0, final_ratio=0.0)
    assert [multiplier(schedule, step, 10) for step in (7, 8, 9, 10)] == [1.0, 1.0, 0.5, 0.0]
