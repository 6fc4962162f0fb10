"""A run says when the GPU waits for the host: `pytest tests/train/test_host_bound.py`."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from overcoat.train import loop
from overcoat.train.config import Config
from overcoat.train.configfile import load_config
from overcoat.train.host_bound import ADVICE, INTERVALS, HostWatch
from overcoat.train.run import run_once

MakeConfig = Callable[..., Config]
GPU = torch.device("cuda")
STEP = 0.05  # seconds


def _advice(watch: HostWatch, waits: list[float]) -> list[int]:
    """After which intervals of 20 steps there is advice, given what the host waited at their ends."""
    return [i for i, waited in enumerate(waits, 1) if watch.saw(20, 20 * STEP, waited)]


def test_once_after_some_intervals_in_a_row(make_config: MakeConfig) -> None:
    assert _advice(HostWatch(make_config(), GPU), 9 * [0.001]) == [INTERVALS]
    assert _advice(HostWatch(make_config(), GPU), [0.001, 0.001, 0.02, 0.001, 0.001, 0.001, 0.001]) == [6]


def test_a_gpu_that_is_asked_too_early_is_no_reason(make_config: MakeConfig) -> None:
    assert _advice(HostWatch(make_config(), GPU), 9 * [0.06 * STEP]) == []
    assert _advice(HostWatch(make_config(), GPU), 9 * [0.04 * STEP]) == [INTERVALS]


@pytest.mark.parametrize(
    "word", ["train.compile=graphs", "optimizer.offload=true", "data.document_mask=true", "recipe.name=bf16"]
)
def test_nothing_is_advised_that_would_be_refused(make_config: MakeConfig, word: str) -> None:
    assert _advice(HostWatch(make_config(word), GPU), 9 * [0.0]) == []


def test_nothing_is_advised_on_a_cpu(make_config: MakeConfig) -> None:
    assert _advice(HostWatch(make_config(), torch.device("cpu")), 9 * [0.0]) == []


def _slow_host() -> None:
    time.sleep(0.2)


def _slow_gpu() -> None:
    torch.cuda._sleep(200_000_000)  # cycles: 0.1 s


@pytest.mark.gpu
@pytest.mark.parametrize(("slow", "times"), [(_slow_host, 1), (_slow_gpu, 0)])
def test_a_run_says_who_waits(
    slow: Callable[[], None], times: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By far, as tests beside this one slow down either."""

    def slower(*arguments: Any) -> loop.StepRecord:
        slow()
        return train_step(*arguments)

    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", slower)
    demo = Path(__file__).parents[2] / "configs" / "demo.toml"
    short = ["train.device=cuda", "train.steps=41", "train.tensorboard=false", "data.max_bytes=2000000"]
    short += ["tokenizer.vocab_size=2048", "eval.every=0", "checkpoint.every=0", "sample.tokens=0"]
    places = [f"train.run_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'data'}"]
    said = Console(file=io.StringIO(), width=500)
    run_once(load_config(demo, [*short, *places]), said, "FP8")
    assert isinstance(said.file, io.StringIO)
    assert said.file.getvalue().count(ADVICE) == times
