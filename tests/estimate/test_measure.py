"""The measured phases: what the two accounts hold, and which step they are of."""

from __future__ import annotations

import pytest
import torch

from overcoat.estimate.measure import _Allocator, measure_step
from overcoat.estimate.meter import aligned
from overcoat.estimate.predict import Phase
from tests.models.zoo import make_batch, make_model

SMALL = {"layers": 1, "hidden_size": 64, "intermediate_size": 96}
LABELS = ["embedding", "block 1 forward", "final norm", "loss", "loss backward", "block 1 backward"]
LABELS += ["embedding backward", "optimizer"]


def test_the_allocator_is_asked_at_each_boundary(monkeypatch):
    """Peaks before the first label belong to nobody; a phase's end is what is allocated when the next begins."""
    peaks, allocated = iter([90, 80, 50, 70]), iter([30, 40])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(allocated))
    account = _Allocator(torch.device("cuda"), lambda _: next(peaks))
    for label in ("embedding", "loss", "end"):
        account.mark(label)
    assert account.phases == [Phase("embedding", 50, 30), Phase("loss", 70, 40)]


@pytest.mark.parametrize("passes", [1, 3])
def test_of_several_passes_the_last(passes):
    """Its gradients are there from the start, which a single one's are not."""
    model = make_model(**SMALL)
    optimizer = torch.optim.SGD(model.parameters())
    weights = sum(aligned(parameter.nbytes) for parameter in model.parameters())
    buffers = sum(aligned(buffer.nbytes) for buffer in model.buffers())
    with measure_step(model, optimizer) as phases:
        for _ in range(passes):
            model(**make_batch(length=8)).loss.backward()
        optimizer.step()
    assert [phase.label for phase in phases] == LABELS
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
