"""What a layer keeps, of every family in the registry: `pytest tests/estimate/test_units.py`."""

from __future__ import annotations

import pytest

from overcoat import Recipe
from overcoat.estimate import Predictor, Setup
from overcoat.estimate.units import HEADS, HIDDEN, INTERMEDIATE, kept_units
from overcoat.models.family import families
from overcoat.models.shapes import Model, sizes

SAMPLES = [(family, sample) for family in families() for sample in family.samples]
KNOWN = {family.layer: (family, sample) for family, sample in reversed(SAMPLES)}


@pytest.mark.parametrize(("family", "sample"), SAMPLES, ids=[sample for _, sample in SAMPLES])
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
        Predictor(Model(kind, fields).changed(num_hidden_layers=count).config())
        .kept(4, 2048, Setup())
        .units(8192, HIDDEN)
        for count in (1, 2)
    ]
    family, sample = KNOWN[kind.removesuffix("Config") + "DecoderLayer"]
    assert totals[1] - totals[0] == pytest.approx(kept_units(family, sample), rel=0.002)
