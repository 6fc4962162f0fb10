"""Where the phases of a step begin, as hooks on a real model see them."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import overcoat
from docs.kept_units import HEADS, HIDDEN, INTERMEDIATE, kept_units
from overcoat import Recipe
from overcoat.estimate import Predictor, Setup, phases
from overcoat.estimate.dry_run import dry_run, trained_model
from overcoat.estimate.phases import Allocator, Phase, watch
from overcoat.models.family import families
from overcoat.models.shapes import Model, sizes
from tests.models.test_encoders import DISTINCT as TOWERS
from tests.models.zoo import DISTINCT, make_batch, make_model
from tests.nightly import mostly_nightly

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


def test_layers_that_return_more_than_their_output():
    config = transformers.FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
    model, marks = transformers.FalconForCausalLM(config), []
    with watch(model, marks.append):
        model(**make_batch(length=8)).loss.backward()
    assert marks == FORWARD + BACKWARD


def test_what_is_no_causal_model():
    with pytest.raises(ValueError, match="Linear is not a causal language model of transformers"):
        watch(nn.Linear(2, 2), print).__enter__()


def test_the_allocator_is_asked_at_each_boundary(monkeypatch):
    """Peaks before the first label belong to nobody; a phase's end is what is allocated when the next begins."""
    peaks, allocated = iter([90, 80, 50, 70]), iter([30, 40])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(allocated))
    monkeypatch.setattr(phases, "restart_peak", lambda _: next(peaks))
    account = Allocator(torch.device("cuda"))
    for label in ("embedding", "loss", "end"):
        account.mark(label)
    assert account.phases == [Phase("embedding", 50, 30), Phase("loss", 70, 40)]


# ---- The dry run on the meta device: what it is given, leaves as it was, and cannot tell ----------------------------


SHAPE = Model("LlamaConfig", sizes(64, 96, 2, 4, 2, 128))


def test_shapes_that_depend_on_data_are_refused():
    def loss(model, batch, sequence):
        return model(input_ids=torch.empty((1, 8), dtype=torch.int64, device="meta").nonzero()).logits.sum()

    with pytest.raises(ValueError, match="a llama model does what PyTorch cannot do without data"):
        dry_run(trained_model(SHAPE.config(), Setup()), 1, 8, Setup(), loss_of=loss)


# ---- What a layer keeps, of every family in the registry ------------------------------------------------------------


SAMPLES = [(family, sample) for family in families() for sample in family.samples]
KNOWN = {family.layer: (family, sample) for family, sample in reversed(SAMPLES)}


@pytest.mark.parametrize(
    ("family", "sample"),
    mostly_nightly(SAMPLES, [case for case in SAMPLES if case[1] in (*DISTINCT, *TOWERS)]),
    ids=lambda each: each if isinstance(each, str) else each.layer,
)
def test_no_family_keeps_more_than_seven_u(family, sample):
    """Two thirds of it is what every block needs: the inputs of its layers in 8 bits, attention, gate and up."""
    units = kept_units(family, sample)
    assert 2.9 < units <= 7.0
    assert kept_units(family, sample, Recipe.leanest()) < 1.1


def test_where_the_units_go():
    """Inputs 0.5 each, attention 2, gate and up 1.34 each (without gate one of them), a norm after 0.5, scales."""
    llama = 0.5 + 2.0 + 0.5 + 2 * INTERMEDIATE / HIDDEN / 2
    scales = 0.09
    for layer, more in (
        ("LlamaDecoderLayer", 0.0),
        ("Gemma2DecoderLayer", 1.0),  # norms after attention and MLP
        ("CLIPEncoderLayer", -INTERMEDIATE / HIDDEN / 2),  # no gate
        ("MixtralDecoderLayer", -INTERMEDIATE / HIDDEN),  # the experts' own
    ):
        assert kept_units(*KNOWN[layer]) == pytest.approx(llama + more + scales, abs=0.05), layer


@pytest.mark.parametrize("kind", ["LlamaConfig", "Olmo2Config", "Qwen3Config"])
def test_units_are_what_a_model_keeps_more_for_a_layer_more(kind):
    fields = sizes(HIDDEN, INTERMEDIATE, 1, HEADS, HEADS, 128, head_dim=HIDDEN // HEADS)
    totals = [
        Predictor(Model(kind, fields).changed(num_hidden_layers=count).config()).kept(4, 2048, Setup()).total_bytes
        / (8192 * HIDDEN * 2)
        for count in (1, 2)
    ]
    family, sample = KNOWN[kind.removesuffix("Config") + "DecoderLayer"]
    assert totals[1] - totals[0] == pytest.approx(kept_units(family, sample), rel=0.002)
