"""Where the phases of a step begin, as hooks on a real model see them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import overcoat
from overcoat.estimate.meter import aligned
from overcoat.estimate.phases import Allocator, Phase, measure_step, watch
from tests.models.zoo import make_batch, make_model

FORWARD = ["embedding", "block 1 forward", "block 2 forward", "final norm", "loss"]
BACKWARD = ["loss backward", "block 2 backward", "block 1 backward", "embedding backward"]
SMALL = {"layers": 2, "hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize("converted", [False, True])
def test_the_phases_of_a_step_in_order(converted):
    """And the residual stream passes into the first block and out of each, and the same way back."""
    model, marks, shapes = make_model(**SMALL), [], []
    if converted:
        overcoat.convert(model)
    with watch(model, marks.append, lambda tensor: shapes.append(tuple(tensor.shape))):
        model(**make_batch(length=8)).loss.backward()
        assert (marks, shapes) == (FORWARD + BACKWARD, [(2, 8, 64)] * 6)
        model(**{**make_batch(length=8), "labels": None})
        assert marks == FORWARD + BACKWARD + FORWARD
        marks.clear()
        model.get_input_embeddings().weight.requires_grad_(False)
        model(**make_batch(length=8)).loss.backward()
        assert marks == FORWARD + BACKWARD[:-1]


def test_what_is_no_causal_model():
    with pytest.raises(ValueError, match="Linear is not a causal language model of transformers"):
        watch(nn.Linear(2, 2), print).__enter__()


def test_the_allocator_is_asked_at_each_boundary(monkeypatch):
    """Peaks before the first label belong to nobody; a phase's end is what is allocated when the next begins."""
    peaks, allocated = iter([90, 80, 50, 70]), iter([30, 40])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(allocated))
    account = Allocator(torch.device("cuda"), lambda _: next(peaks))
    for label in ("embedding", "loss", "end"):
        account.mark(label)
    assert account.phases == [Phase("embedding", 50, 30), Phase("loss", 70, 40)]


@pytest.mark.parametrize(("passes", "tied"), [(1, False), (3, False), (1, True)])
def test_of_several_passes_the_last(passes, tied):
    """Its gradients are there from the start, which a single one's are not; tied weights lie there once."""
    model = make_model(**{**SMALL, "layers": 1}, tie_word_embeddings=tied)
    optimizer = torch.optim.SGD(model.parameters())
    weights = sum(aligned(parameter.nbytes) for parameter in model.parameters())
    buffers = sum(aligned(buffer.nbytes) for buffer in model.buffers())
    with measure_step(model, optimizer) as phases:
        for _ in range(passes):
            model(**make_batch(length=8)).loss.backward()
        optimizer.step()
    labels = [label for label in (*FORWARD, *BACKWARD, "optimizer") if "block 2" not in label]
    assert [phase.label for phase in phases] == labels
    assert phases[-1].end == pytest.approx(2 * weights + buffers, abs=4096)
    start = weights + buffers + (weights if passes > 1 else 0)
    assert phases[0].peak == pytest.approx(start, abs=16384)
