"""The largest batch, and the cheapest changes that make one fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import MixtralConfig

from overcoat import Recipe
from overcoat.estimate import Predictor, Setup
from overcoat.estimate.fit import Room, advise
from overcoat.estimate.predict import CONTEXT
from overcoat.models.shapes import Model, sizes

MIB = 2**20
SHAPE = Model("LlamaConfig", sizes(512, 1376, 4, 4, 2, 4096))
BASELINE = Setup(Recipe.bf16(), moments="fp32", master="bf16+16")


@pytest.fixture(scope="module")
def predictor():
    return Predictor(SHAPE.config())


def room(predictor, mebibytes, batch=4):
    """A GPU with so much room besides the CUDA context."""
    return Room(predictor, batch, 256, 1, CONTEXT + mebibytes * MIB)


@pytest.mark.parametrize("mebibytes", [20, 333])
def test_the_largest_batch_fits_and_one_more_does_not(predictor, mebibytes):
    """None where the weights do not."""
    here = room(predictor, mebibytes)
    largest = here.largest_batch(Setup())
    assert (largest > 0) is (mebibytes > 20)
    assert largest == 0 or here.fits(Setup(), largest)
    assert not here.fits(Setup(), largest + 1)


def test_the_largest_batch_is_found_in_few_runs_of_the_model():
    """Of phases that are lines in the rows three are enough, wherever the search begins."""
    counted = Predictor(SHAPE.config())
    for batch in (1, 4):
        before = len(counted._runs)
        room(counted, 335, batch).largest_batch(Setup())
        assert len(counted._runs) - before <= 3
    before = len(counted._runs)
    assert room(counted, 335).largest_batch(Setup(master="bf16")) > room(counted, 335).largest_batch(Setup())
    assert room(counted, 335).fits(Setup(release_gradients=True))
    assert len(counted._runs) - before <= 1  # only the optimizer differs, or when gradients are freed
    assert room(counted, 20, 5).largest_batch(Setup()) == 0
    assert len(counted._runs) - before <= 2  # of the batch asked for: the weights alone are too large


def test_the_largest_batch_where_lines_bend():
    """Experts' do: from 9 rows on a line showed too little room for the second, which is there to the byte."""
    few = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 32}
    config = MixtralConfig(**few, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    here = Room(Predictor(config), 9, 128, 8, 0)
    limit = here.predict(Setup(recipe=Recipe(head="fp8")), 2).total_bytes
    assert replace(here, limit=limit).largest_batch(Setup(recipe=Recipe(head="fp8"))) == 2


@pytest.mark.parametrize(("mebibytes", "rows"), [(195, 5), (199, 6)])
def test_the_largest_batch_where_rows_take_less_than_lines_are_off(mebibytes, rows):
    """A block's backward is fullest at another moment from some batch on: lines through two runs found a row more."""
    here = room(Predictor(SHAPE.config()), mebibytes, 1)
    setup = Setup(Recipe(checkpoint="block"), release_gradients=True)
    assert here.largest_batch(setup) == rows
    assert here.fits(setup, rows)
    assert not here.fits(setup, rows + 1)


def test_rungs_are_the_changes_on_top_of_each_other(predictor):
    advice = advise(room(predictor, 40), BASELINE)
    assert [rung.change.name for rung in advice.rungs[1:]] == [
        "recipe.head = bf16",
        "recipe.name = default",
        "optimizer.moments = 8bit",
        "recipe.checkpoint = block",
        "release_gradients",
        "optimizer.master = bf16",
        "optimizer.offload",
        "recipe.offload_blocks = all",
    ]
    last = advice.rungs[-1]
    lean = Recipe(checkpoint="block", offload_blocks="all")
    assert last.prediction.setup == Setup(lean, master="bf16", release_gradients=True, offload=True)
    assert last.prediction.peak_bytes < advice.rungs[0].prediction.peak_bytes / 1.5


def test_advice_is_the_cheapest_that_fits(predictor):
    """Each change of the advice is needed: without it, the rest is too large."""
    whole = [rung.prediction.total_bytes for rung in advise(room(predictor, 1), BASELINE).rungs]
    for limit in (*whole[2:7], min(whole)):
        here = Room(predictor, 4, 256, 1, limit)
        advice = advise(here, BASELINE)
        assert advice.changes, limit
        assert here.fits(advice.setup)
        for left_out in advice.changes:
            setup = BASELINE
            for change in advice.changes:
                if change is not left_out:
                    setup = change.apply(setup) or setup
            assert not here.fits(setup), (limit, left_out.name)
