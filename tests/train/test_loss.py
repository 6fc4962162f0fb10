"""The loss of a batch against the model's own and PyTorch's, and without values for the estimator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import overcoat
from overcoat.estimate.dry_run import META
from overcoat.train.build import loss_for_estimates, summed_loss
from overcoat.train.data import IGNORED, Batch, make_batch
from tests.train.runs import EXACT, MakeConfig, make_state


def test_a_converted_model_sums_the_same_loss_without_logits(make_config: MakeConfig) -> None:
    state = make_state(make_config(*EXACT, "data.document_mask=true"))
    batch = make_batch(state.rows.next_rows(3), 0, document_mask=True)
    expected = summed_loss(state.model, batch)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in state.model.named_parameters()}
    state.model.zero_grad()
    overcoat.convert(state.model, overcoat.Recipe(fp8=False))
    with overcoat.memory.record_kept(state.model) as kept:
        loss = summed_loss(state.model, batch)
    assert "linear_cross_entropy" in kept.by_op()
    assert not any(row.shape[-1:] == (50,) for row in kept.rows)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for name, parameter in state.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(summed_loss(state.model.eval(), batch), expected.detach())


class Recording:
    """A model that answers with fixed logits (B, T, 5) and keeps what it was asked."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.logits = torch.randn((2, 3, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
        self.asked: dict[str, object] = {}

    def __call__(self, **asked: object) -> SimpleNamespace:
        self.asked = asked
        return SimpleNamespace(logits=self.logits.to(asked["input_ids"].device))  # type: ignore[attr-defined]


LABELS = torch.tensor([[1, IGNORED, 2], [IGNORED, 4, 0]])
PLACES = torch.tensor([[0, 1, 0], [0, 0, 1]])


def test_ignored_labels_add_nothing_and_documents_reach_the_model() -> None:
    model = Recording()
    ids = torch.zeros_like(LABELS)
    loss = summed_loss(model, Batch(ids, LABELS, PLACES, 4))
    counted = LABELS != IGNORED
    torch.testing.assert_close(loss, F.cross_entropy(model.logits[counted], LABELS[counted], reduction="sum"))
    assert model.asked["input_ids"] is ids
    assert model.asked["position_ids"] is PLACES
    assert model.asked["use_cache"] is False


@pytest.mark.parametrize("document_mask", [False, True])
def test_the_estimators_loss_has_shapes_and_no_values(document_mask: bool) -> None:
    model = Recording()
    loss = loss_for_estimates(document_mask)(model, 2, 3)
    assert (loss.device, loss.shape, loss.dtype) == (META, (), torch.float32)
    ids, places = model.asked["input_ids"], model.asked["position_ids"]
    assert isinstance(ids, torch.Tensor)
    assert (ids.device, ids.shape, ids.dtype) == (META, (2, 3), torch.int64)
    assert (places is not None) == document_mask
    if isinstance(places, torch.Tensor):
        assert (places.device, places.shape, places.dtype) == (META, (2, 3), torch.int64)
