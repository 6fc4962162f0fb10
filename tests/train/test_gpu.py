"""A short training on a GPU: `pytest -m gpu tests/train/test_gpu.py`."""

from __future__ import annotations

import gc
import io
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from overcoat.estimate import Predictor
from overcoat.estimate.predict import Prediction
from overcoat.train.batch_plan import BatchPlan, model_config, training_setup
from overcoat.train.build import loss_for_estimates
from overcoat.train.config import Config
from overcoat.train.configfile import load_config
from overcoat.train.metrics import Row, read_metrics
from overcoat.train.run import run_once, twin_config
from tests.train.runs import CONFIGS, text_of

SHORTER = """train.device=cuda train.steps=80 train.tensorboard=false data.max_bytes=2000000 tokenizer.vocab_size=2048
    eval.every=0 checkpoint.every=0 sample.tokens=0"""
WIDE = """train.steps=6 schedule.warmup_steps=1 data.sequence_length=512 eval.rows=8 model.config.hidden_size=1024
    model.config.intermediate_size=2816 model.config.num_attention_heads=8 model.config.num_key_value_heads=8
    model.config.num_hidden_layers=8 model.config.vocab_size=2048"""
MANY = 64


def demo(tmp_path: Path, *words: str) -> Config:
    """A short run of the demo."""
    places = [f"train.run_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'data'}"]
    return load_config(CONFIGS / "demo.toml", [*SHORTER.split(), *places, *words])


@pytest.mark.gpu
@pytest.mark.parametrize("moments", ["8bit", "fp8"])
def test_a_short_training_keeps_up_with_its_twin_in_less_memory(moments: str, tmp_path: Path) -> None:
    config = demo(tmp_path, f"optimizer.moments={moments}")
    ours = run_once(config, Console(quiet=True), "FP8")
    twin = run_once(twin_config(config), Console(quiet=True), "BF16")
    assert twin.held_out_loss < 6.5  # from ln(2048) = 7.6
    assert abs(ours.held_out_loss / twin.held_out_loss - 1) < 0.02
    assert ours.kept_bytes < 0.6 * twin.kept_bytes
    assert ours.optimizer_bytes < 0.35 * twin.optimizer_bytes


# ---- too little memory ----------------------------------------------------------------------------------------------


@pytest.fixture
def whole_gpu() -> Iterator[None]:
    """What a test takes away from the GPU is given back."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def predicted(config: Config, plan: BatchPlan) -> Prediction:
    predictor = Predictor(model_config(config), loss_for_estimates(config.data.document_mask))
    return predictor.predict(plan.micro_batch, config.data.sequence_length, training_setup(config, plan))


def leave(size: float) -> None:
    """Let PyTorch's allocator have so many bytes beyond what other tests keep alive."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)


def finished(config: Config) -> tuple[list[Row], str]:
    """The fits of a run that goes to its end and learns something, and what it printed."""
    console = Console(file=io.StringIO(), width=200)
    result = run_once(config, console, "run")
    metrics = read_metrics(Path(result.metrics))
    assert list(metrics["train"]) == list(range(1, 7))
    assert result.num_tokens == 6 * MANY * 512
    assert math.isfinite(result.held_out_loss)
    assert metrics["train"][6]["loss"] < metrics["train"][1]["loss"]
    return list(metrics["fit"].values()), text_of(console)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["smaller_batch", "leaner_recipe"])
def test_a_step_that_does_not_fit_is_taken_with_less(way: str, tmp_path: Path, whole_gpu: None) -> None:
    """Room for all rows with block checkpoints and for half of them without, but not for all without."""
    config = demo(tmp_path, *WIDE.split(), f"train.batch_size={MANY}", f"train.on_oom={way}")
    too_much = predicted(config, BatchPlan(MANY)).peak_bytes
    enough = [predicted(config, plan) for plan in (BatchPlan(MANY, True), BatchPlan(MANY // 2))]
    least = max(prediction.peak_bytes + prediction.slack_bytes for prediction in enough)
    assert least < 0.85 * too_much
    leave((least + too_much) / 2)
    plans, text = finished(config)
    assert "ran out of memory; taking it again with" in text
    assert all(row["out_of_memory"] for row in plans)
    if way == "leaner_recipe":
        assert (plans[-1]["micro_batch"], plans[-1]["block_checkpoints"]) == (MANY, True)
    else:
        assert plans[-1]["micro_batch"] < MANY
        assert not plans[-1]["block_checkpoints"]


@pytest.mark.gpu
def test_an_automatic_batch_fits_at_once(tmp_path: Path, whole_gpu: None) -> None:
    """In memory that would not take all rows: fewer are chosen, and the choice lasts."""
    config = demo(tmp_path, *WIDE.split(), "train.batch_size=auto", f"train.global_batch_size={MANY}")
    leave(0.8 * predicted(config, BatchPlan(MANY)).peak_bytes)
    plans, text = finished(config)
    assert f"train.batch_size = auto: {plans[0]['micro_batch']} rows in a forward pass, {MANY} in a step" in text
    assert len(plans) == 1
    assert not plans[0]["out_of_memory"]
    assert 1 < plans[0]["micro_batch"] < MANY


@pytest.mark.gpu
def test_released_gradients_survive_with_block_checkpoints(tmp_path: Path, whole_gpu: None) -> None:
    released = ("optimizer.release_gradients=true", "optimizer.clip=0")
    config = demo(tmp_path, *WIDE.split(), f"train.batch_size={MANY}", *released)
    lean, too_much = predicted(config, BatchPlan(MANY, True)), predicted(config, BatchPlan(MANY)).peak_bytes
    least = lean.peak_bytes + lean.slack_bytes
    assert least < 0.85 * too_much
    leave((least + too_much) / 2)
    plans, _ = finished(config)
    assert [(row["micro_batch"], row["block_checkpoints"]) for row in plans] == [(MANY, True)]
