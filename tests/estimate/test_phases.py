"""Where the phases of a step begin, as hooks on a real model see them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import overcoat
from overcoat.estimate.phases import backward_of, decoder_layers, forward_of, kind_of, watch
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


def test_decoder_layers_keep_their_place_when_converted():
    model = make_model(**SMALL)
    layers = list(model.model.layers)
    assert decoder_layers(model) == layers
    overcoat.convert(model)
    assert decoder_layers(model) == layers
    assert decoder_layers(torch.nn.Linear(2, 2)) == []


def test_kinds_of_phases():
    kinds = [kind_of(label) for label in (*FORWARD, *BACKWARD, "optimizer")]
    assert kinds == ["forward"] * 4 + ["loss"] * 2 + ["backward"] * 3 + ["optimizer"]
    assert (kind_of(forward_of(3)), kind_of(backward_of(3))) == ("forward", "backward")
