"""Routers' figures and the auxiliary loss in training, beside transformers' own and counts by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import overcoat
from overcoat.train.build import summed_loss
from overcoat.train.data import IGNORED, make_batch
from overcoat.train.loop import train_step
from overcoat.train.metrics import read_metrics
from overcoat.train.routing import FIGURES, Routing
from overcoat.train.run import run_once
from tests.train.runs import EXACT, MakeConfig, make_state

EXPERTS = (
    *("model.config.model_type=olmoe", "model.config.intermediate_size=64", "model.config.num_experts=8"),
    *("model.config.num_experts_per_tok=2", "model.config.output_router_logits=true"),
)
COEFFICIENT = "model.config.router_aux_loss_coef="


def test_the_load_is_that_of_the_busiest_expert_of_a_layer() -> None:
    """Over all micro-batches: 4 + 2 tokens in two layers of three experts."""
    even, odd = torch.eye(3)[[0, 1, 2, 0]], torch.eye(3)[[1, 1]]
    routing, config = Routing(), SimpleNamespace(num_experts_per_tok=1)
    assert routing.figures() is None
    for loss, logits in ((1.0, (even, even)), (2.0, (even[:2], odd))):
        routing.add(SimpleNamespace(aux_loss=torch.tensor(loss), router_logits=logits), config)
    figures = routing.figures()
    assert figures is not None
    # The second layer's experts got 2, 1 + 2 and 1 tokens.
    assert figures.tolist() == [1.5, 1.5]


@pytest.mark.parametrize("converted", [False, True])
def test_the_auxiliary_loss_is_trained_as_transformers_does(make_config: MakeConfig, converted: bool) -> None:
    """Without a shift of labels, which `summed_loss` has made; not in eval()."""
    state = make_state(make_config(*EXACT, *EXPERTS, f"{COEFFICIENT}0.5"))
    model, batch = state.model, make_batch(state.rows.next_rows(3), 0, document_mask=True)
    if converted:
        overcoat.convert(model, overcoat.Recipe(fp8=False))
    outputs = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    entropy = F.cross_entropy(outputs.logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    labels = int((batch.labels != IGNORED).sum())
    assert 0 < labels < batch.labels.numel()
    torch.testing.assert_close(summed_loss(model, batch), entropy + 0.5 * labels * outputs.aux_loss)
    with torch.no_grad():
        torch.testing.assert_close(summed_loss(model.eval(), batch), entropy)


def test_a_steps_figures_are_those_of_all_its_micro_batches(make_config: MakeConfig) -> None:
    config = make_config(*EXACT, *EXPERTS, "train.accumulation=2")
    state, other = make_state(config), make_state(config)
    record = train_step(state, config)
    batch = make_batch(other.rows.next_rows(4), 0, document_mask=False)  # both batches of two at once
    outputs = other.model(batch.input_ids, use_cache=False)
    chosen = [each.topk(2).indices.flatten().bincount(minlength=8).float() for each in outputs.router_logits]
    assert record.routing is not None
    aux_loss, load = record.routing.tolist()
    assert aux_loss == pytest.approx(outputs.aux_loss.item(), rel=0.02)  # a mean of products, no product of means
    assert load == pytest.approx(max(float(each.max() / each.mean()) for each in chosen))


@pytest.mark.parametrize("returned", [True, False])
def test_a_run_logs_its_routers_if_the_model_returns_their_logits(make_config: MakeConfig, returned: bool) -> None:
    config = make_config(*EXPERTS, f"model.config.output_router_logits={str(returned).lower()}", "train.steps=3")
    rows = read_metrics(Path(run_once(config, Console(quiet=True), "run").metrics))["train"]
    assert len(rows) == 3
    for row in rows.values():
        assert (row.keys() & set(FIGURES) == set(FIGURES)) is returned
        assert not returned or (row["aux_loss"] >= 1.9 and 1 <= row["expert_load"] <= 4)
