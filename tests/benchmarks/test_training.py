"""The whole benchmark on a tiny model: runs, rows, tables, curves."""

import json

import pytest

from benchmarks.training import RUNS, configured, main
from overcoat.train.build import make_recipe
from overcoat.train.configfile import build_config, dump_toml
from tests.train.conftest import TINY, corpus_files

__all__ = ["corpus_files"]  # a fixture


@pytest.fixture
def tiny(tmp_path, corpus_files):
    """The tiny run as a config file."""
    config = tmp_path / "tiny.toml"
    values = {**TINY, "train": {**TINY["train"], "run_dir": "unused"}}
    config.write_text(dump_toml(build_config(values, [f"data.files={corpus_files}", "train.steps=4"])))
    return config


def test_a_longer_run_stretches_its_schedule(tiny):
    usual = configured(tiny, [], None)
    longer = configured(tiny, [], 64 * 400 - 1)  # 64 tokens a step
    assert usual.train.steps == 4
    assert longer.train.steps == 400
    assert longer.schedule.warmup_steps == 200
    assert (longer.eval.every, longer.train.log_every) == (25, 4)
    assert longer.optimizer == usual.optimizer


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_what_its_name_says(tiny, name):
    config = configured(tiny, RUNS[name], None)
    recipe = make_recipe(config.recipe)
    assert recipe.fp8 == (not name.startswith("bf16") and name != "fp32")
    assert (recipe.head is None) == (name in ("bf16", "bf16-8bit", "bf16-fp8", "fp32", "default-logits"))
    assert (config.model.dtype == "float32") == (name == "fp32")
    assert (recipe.grad_format == "e4m3") == (name in ("e4m3", "block"))
    assert (recipe.linear_scaling == "block") == (name == "block")
    assert (recipe.checkpoint == "block") == (name == "leanest")
    assert (recipe.group_size == 16) == name.startswith("paper")
    exact = name in ("bf16", "bf16-head") or name.endswith("fp32")
    moments = "fp8" if name in ("paper", "bf16-fp8") else "fp32" if exact else "8bit"
    assert config.optimizer.moments == moments


def test_prepare_needs_a_place_for_the_tokens():
    with pytest.raises(SystemExit):
        main(["--prepare"])


def test_from_training_to_curves(tmp_path, tiny, capsys):
    out = tmp_path / "rows" / "training.jsonl"
    common = ["--config", str(tiny), "--data", str(tmp_path / "data"), "--out", str(out)]
    common += ["--figures", str(tmp_path / "figures")]
    main([*common, "--tokens", "384", "--prepare"])
    assert "a run sees 0.0 M" in capsys.readouterr().out
    assert not out.exists()
    main([*common, "--tokens", "384", "--runs", "bf16", "default", "leanest", "block"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["run"] for row in rows] == ["bf16", "default", "leanest", "block"]
    assert {row["data"] for row in rows} == {rows[0]["data"]}
    for row in rows:
        assert row["steps"] == len(row["train_losses"]) == len(row["held_out_losses"]) == 6
        assert row["num_tokens"] == 6 * 2 * 32
        assert row["epoch_tokens"] > row["num_tokens"]
        assert abs(row["held_out_loss"] - rows[0]["held_out_loss"]) < 0.05
    # The same weights and tokens in all: the first loss is FP8's rounding apart, and no more.
    first = [row["train_losses"]["1"] for row in rows]
    assert 0 < max(first) - min(first) < 0.02
    exact, default, leanest, blocks = rows
    assert exact["optimizer_bytes"] > 2.5 * default["optimizer_bytes"]
    assert exact["kept_bytes"] > default["kept_bytes"] > leanest["kept_bytes"]
    assert blocks["held_out_loss"] != default["held_out_loss"]
    text = capsys.readouterr().out
    assert "leanest, seed 0: held-out loss within 0.01 of bf16" in text
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["training-0m.png"]
    # Rows of other kinds, and of older versions, lie in the same file.
    with out.open("a") as file:
        file.write('{"date": "2026-01-01", "runs": {}}\n')
    main([*common, "--report"])
    assert capsys.readouterr().out == text
