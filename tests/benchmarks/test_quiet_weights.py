"""Quiet weights: that what is compared is what the names say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import quiet_weights
from benchmarks.quiet_weights import STOPS_AT, cases, error_of_first, main, train


def test_gradients_are_those_of_the_names() -> None:
    generator = torch.Generator().manual_seed(0)
    found = cases(generator)
    for name in ("stops beside constant gradients", "stops beside noise"):
        quiet, gradient, _ = found[name]
        assert gradient(STOPS_AT - 1, generator)[:, quiet].all()
        after = gradient(STOPS_AT, generator)
        assert not after[:, quiet].any()
        assert after[:, ~quiet].all()
    quiet, gradient, _ = found["comes in 0.2% of the steps"]
    comes = torch.stack([gradient(step, generator)[:, quiet] != 0 for step in range(200)]).float().mean()
    assert comes == pytest.approx(0.002, rel=0.3)
    quiet, gradient, _ = found["1000 times smaller than one neighbour's"]
    grad = torch.stack([gradient(step, generator) for step in range(20)])
    assert grad[..., ~quiet].std() / grad[..., quiet].std() == pytest.approx(1000, rel=0.2)


def test_the_same_codes_go_the_same_way() -> None:
    case = cases(torch.Generator().manual_seed(0))["stops beside noise"]._replace(steps=60)
    first, second = train(case, "fp32", 1), train(case, "fp32", 1)
    assert torch.equal(first[0], second[0])
    assert 0 < first[1] < 1
    assert not torch.equal(first[0], train(case, "8bit", 1)[0])
    assert error_of_first("fp32") == 0
    assert error_of_first("8bit") < 0.5 * error_of_first("fp8")


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"stops": cases(torch.Generator().manual_seed(0))["stops beside noise"]._replace(steps=52)}
    monkeypatch.setattr(quiet_weights, "cases", lambda generator: short)
    monkeypatch.setattr(sys, "argv", ["quiet_weights", "--moments", "8bit", "--out", str(tmp_path / "rows.jsonl")])
    main()
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert row["cases"]["stops"]["way"] == pytest.approx(1, abs=0.1)
    assert row["moments"] == "8bit"
