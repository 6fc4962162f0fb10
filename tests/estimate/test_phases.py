"""Where the phases of a step begin, as hooks on a real model see them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import overcoat
from overcoat.estimate.meter import aligned
from overcoat.estimate.phases import Allocator, Phase, kind_of, measure_step, watch
from tests.models.zoo import make_batch, make_model

FORWARD = ["embedding", "block 1 forward", "block 2 forward", "final norm", "loss"]
BACKWARD = ["loss backward", "block 2 backward", "block 1 backward", "embedding backward"]
SMALL = {"layers": 2, "hidden_size": 64, "intermediate_size": 96}


def seen(model, **changes):
    marks = []
    with watch(model, marks.append):
        result = model(**{**make_batch(length=8), **changes})
        if result.loss is not None:
            result.loss.backward()
    return marks


@pytest.mark.parametrize("converted", [False, True])
def test_the_phases_of_a_step_in_order(converted):
    model = make_model(**SMALL)
    if converted:
        overcoat.convert(model)
    assert seen(model) == FORWARD + BACKWARD
    assert seen(model, labels=None) == FORWARD


def test_a_frozen_embedding_has_no_backward():
    model = make_model(**SMALL)
    model.get_input_embeddings().weight.requires_grad_(False)
    assert seen(model) == FORWARD + BACKWARD[:-1]


def test_the_residual_stream_and_its_gradient_pass_between_blocks():
    """Into the first block and out of each, and the same way back."""
    model, shapes = make_model(**SMALL), []
    with watch(model, lambda _: None, lambda tensor: shapes.append(tuple(tensor.shape))):
        model(**make_batch(length=8)).loss.backward()
    assert shapes == [(2, 8, 64)] * 6


def test_nothing_is_watched_after_an_error():
    model, marks = make_model(**SMALL), []
    with pytest.raises(KeyError), watch(model, marks.append):
        raise KeyError
    model(**make_batch(length=8)).loss.backward()
    assert marks == []


def test_what_is_no_causal_model():
    with (
        pytest.raises(ValueError, match="Linear is not a causal language model of transformers"),
        watch(nn.Linear(2, 2), print),
    ):
        pass


def test_kinds_of_phases():
    kinds = [kind_of(label) for label in (*FORWARD, *BACKWARD, "optimizer")]
    assert kinds == ["forward"] * 4 + ["loss"] * 2 + ["backward"] * 3 + ["optimizer"]


# ---- a real step --------------------------------------------------------------------------------------------------


def test_the_allocator_is_asked_at_each_boundary(monkeypatch):
    """Peaks before the first label belong to nobody; a phase's end is what is allocated when the next begins."""
    peaks, allocated = iter([90, 80, 50, 70]), iter([30, 40])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(allocated))
    account = Allocator(torch.device("cuda"), lambda _: next(peaks))
    for label in ("embedding", "loss", "end"):
        account.mark(label)
    assert account.phases == [Phase("embedding", 50, 30), Phase("loss", 70, 40)]


@pytest.mark.parametrize("passes", [1, 3])
def test_of_several_passes_the_last(passes):
    """Its gradients are there from the start, which a single one's are not."""
    model = make_model(**{**SMALL, "layers": 1})
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


def test_tied_weights_lie_there_once():
    model = make_model(**SMALL, tie_word_embeddings=True)
    optimizer = torch.optim.SGD(model.parameters())
    with measure_step(model, optimizer) as phases:
        model(**make_batch(length=8)).loss.backward()
        optimizer.step()
    there = [*model.parameters(), *model.buffers()]
    assert phases[0].peak == pytest.approx(sum(aligned(tensor.nbytes) for tensor in there), abs=16384)


def test_nothing_is_measured_after_an_error():
    model = make_model(**SMALL)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(KeyError), measure_step(model, optimizer):
        raise KeyError
    assert not optimizer._optimizer_step_pre_hooks
    assert not model._forward_hooks
