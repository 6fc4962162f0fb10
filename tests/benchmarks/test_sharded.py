"""The sharded benchmark's cases; a small one in two processes (gloo), and its row."""

from __future__ import annotations

import pytest

from benchmarks import sharded
from benchmarks.sharded import CASES, PEER, line, row_of, run


def test_cases() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    setups = [case.setup for case in CASES if not case.is_peer]
    assert len({setup.recipe for setup in setups}) > 1
    assert max(setup.accumulation for setup in setups) > 1
    # The peer takes the same rows as ours.
    peer = next(case for case in CASES if case.is_peer)
    assert peer.name.endswith(PEER)
    assert any(
        (case.shape, case.batch, case.sequence) == (peer.shape, peer.batch, peer.sequence) for case in CASES[:-1]
    )


def test_a_small_case_in_two_processes() -> None:
    """Counted tensors against the prediction, on each process."""
    row, where = run(CASES[0], 2, "cpu")
    assert "error" not in row, row
    assert where is not None
    assert where["command"]
    assert row["measured"] == pytest.approx([row["predicted"]] * 2, rel=0.01)
    assert row["predicted_moment"] == row["measured_moment"]
    assert row["predicted_peaks"].keys() == row["measured_peaks"].keys()
    assert row["tokens_per_second"] == 2 * row["tokens_per_second_per_gpu"] > 0
    assert 6.5 < row["loss"] < 7.5  # ln 1024 = 6.9: nothing is learned, nothing breaks


def test_the_row_of_several_gpus() -> None:
    """The slowest one's time, each one's memory; nothing is predicted for the peer."""
    found = [{"ms": ms, "measured": size, "reserved": size, "outside": 0} for ms, size in ((400.0, 30), (500.0, 29))]
    row = row_of(CASES[-1], 2, "cuda", found)
    assert row["ms"] == 500.0
    assert (row["tokens_per_second_per_gpu"], row["tokens_per_second"]) == (16384.0, 32768.0)
    assert row["measured"] == [30, 29]
    assert "predicted" not in row
    assert "16,384 tokens/s on each of 2" in line({**row, "seconds": 1.0})


def test_a_case_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_arguments: object) -> None:
        raise sharded.mp.ProcessRaisedException("Process 1 terminated\n\ntorch.OutOfMemoryError: no memory\n", 1, 2)

    monkeypatch.setattr(sharded, "launch", no_room)
    row, where = run(CASES[1], 2, "cuda")
    assert row == {"case": "7b default", "gpus": 2, "error": "torch.OutOfMemoryError: no memory"}
    assert where is None
    assert line(row).split() == ["7b", "default", "torch.OutOfMemoryError:", "no", "memory"]
