"""A short training on a GPU: `pytest -m gpu tests/train/test_gpu.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from overcoat.train.configfile import load_config
from overcoat.train.run import run_once, twin_config

SHORTER = [
    "train.device=cuda",
    "train.steps=80",
    "train.tensorboard=false",
    "data.max_bytes=2000000",
    "tokenizer.vocab_size=2048",
    "eval.every=0",
    "checkpoint.every=0",
    "sample.tokens=0",
]


@pytest.mark.gpu
@pytest.mark.parametrize("moments", ["8bit", "fp8"])
def test_a_short_training_keeps_up_with_its_twin_in_less_memory(moments: str, tmp_path: Path) -> None:
    demo = Path(__file__).parents[2] / "configs" / "demo.toml"
    places = [f"train.run_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'data'}"]
    config = load_config(demo, [*SHORTER, f"optimizer.moments={moments}", *places])
    ours = run_once(config, Console(quiet=True), "FP8")
    twin = run_once(twin_config(config), Console(quiet=True), "BF16")
    assert twin.held_out_loss < 6.5  # from ln(2048) = 7.6
    assert abs(ours.held_out_loss / twin.held_out_loss - 1) < 0.02
    assert ours.kept_bytes < 0.6 * twin.kept_bytes
    assert ours.optimizer_bytes < 0.35 * twin.optimizer_bytes
