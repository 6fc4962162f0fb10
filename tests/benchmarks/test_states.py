"""The whole benchmark on a tiny model: runs, snapshots, rows, tables, figures."""

import json

import pytest

from benchmarks.states import chosen_snapshots, main, usual_snapshots
from overcoat.train.configfile import build_config, dump_toml
from tests.train.conftest import TINY, corpus_files

__all__ = ["corpus_files"]  # a fixture


def test_usual_snapshots_of_the_real_run():
    assert usual_snapshots(640) == [20, 100, 320, 640]
    assert usual_snapshots(1) == [1]


def test_snapshots_outside_the_run_are_refused():
    assert chosen_snapshots([3, 1], 10) == [3, 1]
    assert chosen_snapshots([], 10) == []
    with pytest.raises(ValueError, match="--snapshots 11: the run has the steps 1 to 10"):
        chosen_snapshots([11], 10)


def test_report_without_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file; run the benchmark first"):
        main(["--report", "--out", str(tmp_path / "none.jsonl")])


def test_from_training_to_figures(tmp_path, corpus_files, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.state_codes.EXPONENTS", (24, 32, 48))  # a short search: it has tests of its own
    config = tmp_path / "tiny.toml"
    # In BF16, as the 124M run: parameters and gradients.
    values = {**TINY, "train": {**TINY["train"], "run_dir": "unused"}}
    config.write_text(dump_toml(build_config(values, [f"data.files={corpus_files}", "train.steps=4"])))
    out = tmp_path / "rows" / "states.jsonl"
    common = ["--config", str(config), "--data", str(tmp_path / "data"), "--out", str(out)]
    common += ["--figures", str(tmp_path / "figures")]
    main([*common, "--runs", "fp32", "8bit", "fp32", "--snapshots", "4"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = [(row["kind"], row["run"]) for row in rows]
    assert kinds == [("snapshot", "fp32"), ("run", "fp32"), ("run", "8bit"), ("run", "fp32")]
    snapshot, exact, coded, again = rows
    assert again["held_out_loss"] == exact["held_out_loss"]
    assert snapshot["step"] == 4
    assert set(snapshot["elements"]) == {"embedding", "q", "k", "v", "o", "mlp", "norm", "all"}  # tied: no head
    assert 0 < snapshot["errors"]["sqrt8|log8"]["all"] < snapshot["errors"]["e4m3|e4m3"]["all"]
    assert exact["data"] == coded["data"]
    assert exact["num_tokens"] == coded["num_tokens"] == 4 * 2 * 32
    assert exact["optimizer_bytes"] > 2.5 * coded["optimizer_bytes"]
    assert exact["held_out_loss"] != coded["held_out_loss"]
    assert abs(exact["held_out_loss"] - coded["held_out_loss"]) < 0.05
    text = capsys.readouterr().out
    assert "8bit, seed 0: held-out loss within 0.005 of fp32" in text
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "optimizer-states-codes.png",
        "optimizer-states-range.png",
    ]
    main([*common, "--report"])
    assert capsys.readouterr().out == text
