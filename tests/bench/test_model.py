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
    parameters = multiplied_parameters(model)
    ours = step_flops(parameters, ids.numel(), 64, model.config)
    products = step_flops(parameters, ids.numel(), 0, model.config)
    assert products + 2 * (ours - products) == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize(
    ("speeds", "tried", "best"),
    [
        # Tokens per second by batch; what is not there does not fit. The first one was tried before the search.
        ({batch: 1000 * batch / (batch + 8) for batch in range(1, 14)}, [4, 8, 16, 12, 14, 13], 13),
        ({batch: 1000 * batch / (batch + 8) for batch in range(1, 17)}, [4, 8, 16, 32, 24, 20, 18], 16),
        ({1: 100.0}, [4, 2, 1], 1),
        ({}, [4, 2, 1], None),
        ({3: 100.0}, [3, 6, 4], 3),
        ({batch: 1000 * batch / (batch + 0.05) for batch in range(1, 999)}, [4, 8], 8),  # larger ones bring nothing
        ({4: 100.0, 8: 120.0, 12: 110.0, 14: 109.0}, [4, 8, 16, 12, 14, 15], 8),  # the fastest, not the largest
        ({4: 100.0, 8: 120.0, 16: "RuntimeError: no kernel"}, [4, 8, 16], 8),  # another error ends the search
        ({4: "RuntimeError: no kernel"}, [4], None),
    ],
)
def test_the_best_batch_is_found(speeds: dict[int, Any], tried: list[int], best: int | None) -> None:
    seen: list[int] = []

    def run(batch: int) -> dict[str, Any]:
        seen.append(batch)
        found = speeds.get(batch, OUT_OF_MEMORY)
        return {"batch": batch, "error" if isinstance(found, str) else "tokens_per_second": found}

    first = run(tried[0])
    found = search_best_batch(run, first)
    assert seen == tried
    assert found is first if best is None else found["batch"] == best


def test_steps_on_fresh_tokens_tell_their_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every pass of graphs is begun."""
    begun: list[bool] = []
    trainer = TRAINERS["overcoat graphs"]
    uncompiled = trainer._replace(engine=trainer.engine._replace(compile=None))
    monkeypatch.setitem(TRAINERS, "overcoat graphs", uncompiled)
    monkeypatch.setattr("overcoat.bench.model.begin_pass", lambda: begun.append(True))
    for name, count in (("overcoat", 0), ("overcoat graphs", 2)):
        step, loss, parameters = training(name, SMALL, 2, 32, "cpu")
        losses = []
        for _ in range(2):
            step()
            losses.append(loss.item())
        assert len(begun) == count
        assert losses[0] != losses[1]
        assert all(abs(value - math.log(320)) < 1 for value in losses)
        assert parameters == multiplied_parameters(build_model(SMALL, torch.bfloat16, "cpu"))


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
