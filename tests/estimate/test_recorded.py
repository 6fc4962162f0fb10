"""Predicted times against the runs that the result rows hold: the error that `overcoat estimate` states."""

from __future__ import annotations

import statistics

import pytest

from overcoat.estimate.times import ERROR
from tests.estimate.recorded import Run, main, runs


def errors(found: list[Run]) -> list[float]:
    """Of those limited by the GPU; hidden 576, in CUDA graphs, apart."""
    return [abs(run.error) for run in found if run.bound == "GPU" and "smollm2" not in run.name]


def test_predicted_times_of_some_runs() -> None:
    """As CUDA graphs; a lean model, released; on two GPUs."""
    found = list(runs(("124m 8 x 1024, overcoat graphs", "7b 4 x 2048, overcoat leanest, released", "7b default, 2")))
    assert len(errors(found)) == 3
    assert max(errors(found)) < 0.09
    assert statistics.median(errors(found)) < 0.04


def test_predicted_time_of_a_streamed_run() -> None:
    """Its copies limit it, by the link's default rate, which no row records."""
    (run,) = runs(("llama-2-7b 4 x 2048, overcoat leanest, streamed",))
    assert run.bound == "link"
    assert abs(run.error) < 0.15


@pytest.mark.nightly
def test_predicted_times_of_all_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(runs())
    few = [run for run in found if run.bound == "GPU"]
    median, largest = statistics.median(abs(run.error) for run in few), max(errors(found))
    stated = f"{len(few)} measured runs limited by the GPU: median error {median:.1%}, largest {largest:.0%}"
    assert ERROR.startswith(stated), stated
    assert max(abs(run.error) for run in few) < 0.2
    main()
    assert capsys.readouterr().out.count(" ms ") == len(found)
