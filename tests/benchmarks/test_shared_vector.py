"""A vector that all values share: without centering it is lost in attention's gradients, with it nothing is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import shared_vector
from benchmarks.activation_probes import BF16


def test_what_is_shared_costs_nothing_once_it_is_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_vector, "SIZES", (0.0, 10.0))
    monkeypatch.setattr(shared_vector, "SEQUENCE", 64)
    shared_vector.main(["--out", str(tmp_path / "rows.jsonl")])
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    alone, shared = row["sqnr"]["0.0"], row["sqnr"]["10.0"]
    assert set(shared) == {BF16, *shared_vector.WAYS}
    for name in ("dq", "dk"):
        assert shared["q k v o"][name] == pytest.approx(alone["q k v o"][name], abs=1.0)
        # Of v's error and o's each is enough to spoil it: sqrt8's grows with the value's root.
        assert all(shared[way][name] < shared["q k v o"][name] - 8 for way in ("q k", "q k v", "q k o"))
