"""The small cards' cases: that they should fit, and how a row reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cards import BOTH, GROUPS, LEANEST, describe, line
from overcoat.bench.shapes import MODELS
from overcoat.estimate import Predictor

BY_NAME = {group.name: group for group in GROUPS}


@pytest.mark.parametrize(
    ("name", "recipe", "rows"),
    [
        ("24 GB, released, states offloaded", LEANEST, 1),
        ("8 GB, states offloaded", BOTH, 4),  # clipped
        ("8 GB, released, states offloaded", BOTH, 8),
    ],
)
def test_the_models_fit_their_cards(name, recipe, rows):
    group = BY_NAME[name]
    predictor = Predictor(MODELS[group.model].config())
    setup = replace(group.setup, recipe=recipe)
    assert group.batch(predictor, setup, rows) == rows
    row = describe(group, predictor, setup, rows)
    assert row["predicted_total"] <= group.limit < group.card * 2**30
    assert row["predicted_host"] > 3e9
    assert row["clip"] == (None if setup.release_gradients else 1.0)


def test_gradients_and_states_together_do_not_fit_the_small_card():
    group = BY_NAME["8 GB"]
    ((recipe, most),) = group.recipes
    predictor = Predictor(MODELS[group.model].config())
    assert group.batch(predictor, replace(group.setup, recipe=recipe), most) == 0


def test_lines():
    group = BY_NAME["8 GB"]
    row = describe(group, Predictor(MODELS["124m"].config()), group.setup, 2)
    assert "out of memory" in line({**row, "error": "out of memory"})
    figures = dict.fromkeys(("peak_bytes", "reserved_bytes", "outside_bytes", "host_states", "host_activations"), 2**30)
    text = line({**row, **figures, "tokens_per_second": 1234.5})
    assert "B2 " in text
    assert "1,234 tok/s" in text
    assert "host   2.00" in text
