"""`bench model`: the FLOP count, the search for the best batch, and a step's tokens and loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from overcoat.bench.contestants import TRAINERS
from overcoat.bench.model import measure, multiplied_parameters, search_best_batch, step_flops, training
from overcoat.bench.session import OUT_OF_MEMORY
from overcoat.bench.shapes import build_model
from overcoat.models.shapes import Model, sizes
from tests.bench.peers import SMALL


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_that_pytorch_counts(tied: bool) -> None:
    """PyTorch counts the products as run: all of attention's square, where the formula counts the causal half."""
    model = build_model(SMALL.changed(tie_word_embeddings=tied), torch.float32, "cpu")
    model.set_attn_implementation("eager")
    ids = torch.randint(320, (2, 64))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    counted = counter.get_total_flops()
    parameters = multiplied_parameters(model)
    ours = step_flops(parameters, ids.numel(), 64, model.config)
    products = step_flops(parameters, ids.numel(), 0, model.config)
    assert products + 2 * (ours - products) == pytest.approx(counted, rel=0.01)


class Runs:
    """Tokens per second by batch: rises towards 1000 tokens/s; nothing above `limit` fits."""

    def __init__(self, limit: int, half: float, broken: int | None = None) -> None:
        self.limit, self.half, self.broken, self.tried = limit, half, broken, [0]

    def __call__(self, batch: int) -> dict[str, Any]:
        self.tried.append(batch)
        if batch == self.broken:
            return {"batch": batch, "error": "RuntimeError: no kernel"}
        if batch > self.limit:
            return {"batch": batch, "error": OUT_OF_MEMORY}
        return {"batch": batch, "tokens_per_second": 1000.0 * batch / (batch + self.half)}


@pytest.mark.parametrize(
    ("limit", "start", "best", "tried"),
    [
        (13, 4, 13, [8, 16, 12, 14, 13]),
        (16, 4, 16, [8, 16, 32, 24, 20, 18]),
        (1, 4, 1, [2, 1]),
        (0, 4, None, [2, 1]),
        (3, 3, 3, [6, 4]),
    ],
)
def test_the_largest_batch_that_fits_is_found(limit: int, start: int, best: int | None, tried: list[int]) -> None:
    runs = Runs(limit, half=8.0)
    first = runs(start)
    found = search_best_batch(runs, first)
    assert runs.tried[2:] == tried
    assert found == (first if best is None else runs(best))


def test_the_search_ends_when_larger_batches_bring_nothing() -> None:
    runs = Runs(10**6, half=0.05)
    assert search_best_batch(runs, runs(4))["batch"] == 8
    assert runs.tried == [0, 4, 8]


def test_the_fastest_wins_and_not_the_largest() -> None:
    speeds = {4: 100.0, 8: 120.0, 12: 110.0, 14: 109.0}

    def run(batch: int) -> dict[str, Any]:
        if batch not in speeds:
            return {"batch": batch, "error": OUT_OF_MEMORY}
        return {"batch": batch, "tokens_per_second": speeds[batch]}

    assert search_best_batch(run, run(4))["batch"] == 8


def test_another_error_ends_the_search() -> None:
    runs = Runs(100, half=8.0, broken=16)
    assert search_best_batch(runs, runs(4))["batch"] == 8
    broken = {"batch": 4, "error": "RuntimeError: no kernel"}
    assert search_best_batch(runs, broken) is broken


def test_steps_on_fresh_tokens_tell_their_loss() -> None:
    step, loss, parameters = training("overcoat", SMALL, 2, 32, "cpu")
    losses = []
    for _ in range(2):
        step()
        losses.append(loss.item())
    assert losses[0] != losses[1]
    assert all(abs(value - math.log(320)) < 1 for value in losses)
    assert parameters == multiplied_parameters(build_model(SMALL, torch.bfloat16, "cpu"))


@pytest.mark.parametrize(("name", "count"), [("overcoat", 0), ("overcoat graphs", 2)])
def test_every_pass_of_graphs_is_begun(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    trainer = TRAINERS["overcoat graphs"]
    eager = trainer._replace(engine=trainer.engine._replace(compile=None))
    monkeypatch.setitem(TRAINERS, "overcoat graphs", eager)
    monkeypatch.setattr("overcoat.bench.model.begin_pass", lambda: begun.append(True))
    step, *_ = training(name, SMALL, 2, 32, "cpu")
    step()
    step()
    assert len(begun) == count


@pytest.mark.gpu
def test_the_peak_of_graphs_counts_what_recording_them_allocates() -> None:
    """In replays nothing is allocated: counted as the others', the peak would lack what blocks keep, 5.8 U each."""
    rows, tokens = 8, 1024
    figures = measure("overcoat graphs", Model("LlamaConfig", sizes(512, 1024, 4, 4, 4, 1024)), rows, tokens, 2)
    kept = 4 * 5.5 * rows * tokens * 512 * 2
    states = (2 + 2 + 3) * figures["parameters"]  # weight, gradient, moments and remainder
    assert figures["peak_bytes"] > kept + states


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["overcoat", "overcoat graphs", "overcoat leanest, released", "bf16 compile, torch AdamW"]
)
def test_a_tiny_run_measures_speed_and_memory(name: str) -> None:
    figures = measure(name, Model("LlamaConfig", sizes(512, 1024, 2, 4, 4, 1024)), 2, 256, 2)
    assert figures["tokens_per_second"] == pytest.approx(2 * 256 / figures["ms"] * 1e3)
    assert figures["reserved_bytes"] >= figures["peak_bytes"] > 2 * figures["parameters"]
    assert 0 < figures["loss"] < 20
