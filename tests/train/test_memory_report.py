"""`memory.report`: a real step measured beside its prediction, on the CPU and on a GPU."""

from __future__ import annotations

import io
import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from rich.console import Console

from overcoat.train.config import Config
from overcoat.train.loop import RunStoppedError
from overcoat.train.run import run_once
from tests.train.runs import MakeConfig, stop_at

# Wide enough that the scalars of a step do not matter.
WIDE = ("model.config.hidden_size=256", "model.config.intermediate_size=512", "tokenizer.vocab_size=1024")
SHORT = ("train.steps=3", "eval.every=0", "checkpoint.every=0")


def report(config: Config, console: Console) -> dict:
    run_once(config, console, "Overcoat")
    return written(config)


def written(config: Config) -> dict:
    return json.loads((Path(config.train.run_dir) / "memory.json").read_text())


def run_quietly(config: Config) -> None:
    run_once(config, Console(file=io.StringIO()), "Overcoat")


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("train.accumulation=2", "recipe.name=leanest"),
        ("optimizer.release_gradients=true", "optimizer.clip=0"),
        pytest.param(("recipe.name=bf16", "optimizer.moments=fp32"), marks=pytest.mark.nightly),
    ],
    ids=["default", "accumulation", "released", "bf16"],
)
def test_a_real_step_is_what_was_predicted(make_config: MakeConfig, console: Console, changes: tuple[str, ...]) -> None:
    config = make_config(*WIDE, *SHORT, *changes, "memory.report=true", "data.sequence_length=64")
    data = report(config, console)
    figures = data["figures"]
    for name in ("weights", "moments and remainders", "gradients, backward done"):
        assert figures[name]["predicted"] == figures[name]["measured"], name
    for name, figure in figures.items():
        assert figure["predicted"] == pytest.approx(figure["measured"], rel=0.01), name
    assert figures["peak of the step"]["predicted"] == max(phase["peak"] for phase in data["predicted"])
    assert [phase["label"] for phase in data["measured"]] == [phase["label"] for phase in data["predicted"]]
    text = (Path(config.train.run_dir) / "memory.txt").read_text()
    assert "peak of the step" in text
    state = "own" if config.recipe.name == "bf16" else "fused"
    assert {row["state"] for row in data["branches"]} == {state}
    assert all(f"{row['after']:,.0f}" in text for row in data["branches"])
    assert (Path(config.train.run_dir) / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_training_goes_on_where_branches_cannot_be_measured(
    make_config: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("overcoat.train.memory_report.measure_branches", run_out)
    config = make_config(*SHORT, "memory.report=true")
    assert report(config, console)["branches"] == []
    assert "not measured: CUDA out of memory" in (Path(config.train.run_dir) / "memory.txt").read_text()


def test_a_run_resumed_for_one_step_measures_that(make_config: MakeConfig, console: Console) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(2, patch)
        with pytest.raises(RunStoppedError):
            run_once(make_config(*SHORT), console, "stopped")
    assert report(make_config(*SHORT, "memory.report=true"), console)["measured"]


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [(), ("recipe.name=leanest", "train.accumulation=2")], ids=["default", "leanest"])
def test_a_step_on_a_gpu_is_what_was_predicted(make_config: MakeConfig, changes: tuple[str, ...]) -> None:
    """Large enough to dwarf what the libraries take."""
    config = make_config(
        "train.device=cuda", "train.batch_size=32", "data.sequence_length=512", "model.config.hidden_size=1024",
        "model.config.intermediate_size=2816", "model.config.num_hidden_layers=4", "model.config.num_attention_heads=8",
        "memory.report=true", *SHORT, *changes,
    )  # fmt: skip
    # Of its own: tensors and libraries' workspaces that other tests leave in this process would count as the step's.
    process = multiprocessing.get_context("spawn").Process(target=run_quietly, args=(config,))
    process.start()
    process.join()
    figures = written(config)["figures"]
    assert figures["kept for the backward"]["predicted"] == figures["kept for the backward"]["measured"]
    for name in ("allocated, forward done", "peak, forward", "peak, loss", "peak, backward", "peak of the step"):
        assert figures[name]["predicted"] == pytest.approx(figures[name]["measured"], rel=0.05), name
