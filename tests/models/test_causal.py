"""Masks that only converted layers read: when a model gets them, that they change nothing, and that nobody waits."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import overcoat
from overcoat.models.causal import causal_mask
from tests.models.zoo import make_batch, make_model
from tests.waits import waiting_is_an_error

KINDS = ["llama", "qwen2", "qwen3", "starcoder2"]
LENGTH = 61


@pytest.fixture
def packing_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for packed sequences, which waits on a GPU, is an error."""

    def wait(*args: object, **kwargs: object) -> None:
        raise AssertionError("looked for packed sequences")

    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", wait)


def positions() -> torch.Tensor:
    return torch.arange(LENGTH).expand(2, -1)


def converted(kind: str = "llama") -> nn.Module:
    """The zoo's Starcoder2 has a narrow window."""
    model = make_model(kind, layers=2, **({"sliding_window": LENGTH} if kind == "starcoder2" else {}))
    overcoat.convert(model)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_loss_and_gradients_without_looking(kind: str, request: pytest.FixtureRequest) -> None:
    model, inputs = converted(kind), make_batch(length=LENGTH)
    expected = model(**inputs, position_ids=positions()).loss
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    request.getfixturevalue("packing_unseen")
    loss = model(**inputs).loss
    loss.backward()
    assert torch.equal(loss, expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name


def test_a_layer_in_its_original_precision_is_causal_too(request: pytest.FixtureRequest) -> None:
    model, inputs = converted(), make_batch(length=LENGTH)
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="has hooks"):
        expected = model(**inputs, position_ids=positions()).loss
    request.getfixturevalue("packing_unseen")
    with pytest.warns(UserWarning, match="has hooks"):
        loss = model(**inputs).loss
    assert torch.equal(loss, expected)


def test_who_gets_it() -> None:
    ids = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)}
    model = converted()
    for inputs in (ids, {**ids, "use_cache": False}, {"inputs_embeds": torch.zeros(2, LENGTH, 8)}):
        assert causal_mask(model, inputs).shape == (1, 1, 0, 0)
    padding = torch.ones(2, LENGTH)
    assert causal_mask(model, {**ids, "attention_mask": padding}) is padding
    for name, value in (("past_key_values", object()), ("use_cache", True)):
        assert causal_mask(model, {**ids, name: value}) is None
    assert causal_mask(model, {**ids, "position_ids": positions()}).shape == (1, 1, 0, 0)
    assert causal_mask(model, {**ids, "position_ids": positions()[:1]}).shape == (1, 1, 0, 0)
    packed = torch.arange(LENGTH).remainder(20).expand(2, -1)
    assert causal_mask(model, {**ids, "position_ids": packed}).flatten().tolist() == [
        0,
        20,
        40,
        60,
        61,
        81,
        101,
        121,
        122,
    ]
    assert causal_mask(model, {**ids, "position_ids": packed.to("meta")}).shape == (1, 1, 1, 4)
    for name, value in (("sliding_window", 16), ("_attn_implementation", "eager")):
        before = getattr(model.config, name, None)
        setattr(model.config, name, value)
        assert causal_mask(model, ids) is None
        setattr(model.config, name, before)
    model.config.sliding_window = LENGTH
    assert causal_mask(model, ids) is not None
    for watch in (
        lambda model: model.model.register_forward_pre_hook(lambda *_: None),
        lambda model: model.model.layers[1].register_forward_hook(lambda *_: None),
        lambda model: setattr(model.model, "forward", model.model.forward),
        lambda model: setattr(model.model.layers[0], "forward", model.model.layers[0].forward),
    ):
        watched = converted()
        watch(watched)
        assert causal_mask(watched, ids) is None
    assert causal_mask(model, {}) is None
    partly = make_model("llama", layers=2)
    overcoat.convert(partly, filter_fn=lambda module, name: not name.endswith(".1"))
    assert causal_mask(partly, ids) is None


def test_a_sliding_window_is_kept() -> None:
    """Mistral's, narrower than the sequence."""
    model, inputs = make_model("mistral", layers=2), make_batch(length=LENGTH)
    model.config.sliding_window = 16
    overcoat.convert(model)
    narrow = model(**inputs).loss
    assert torch.equal(narrow, model(**inputs, position_ids=positions()).loss)
    model.config.sliding_window = None
    assert not torch.equal(narrow, model(**inputs).loss)


@pytest.mark.parametrize("hooked", [False, True])
def test_packed_sequences_get_starts_and_give_the_same(hooked: bool) -> None:
    """As with transformers' own mask, which it makes where somebody watches; a layer in its original precision too."""
    model, inputs = converted(), make_batch("packed", length=LENGTH)
    if hooked:
        model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    assert causal_mask(model, {**inputs, "use_cache": False}).shape[:3] == (1, 1, 1)
    losses = []
    for watched in (False, True):
        if watched:
            model.model.layers[0].register_forward_hook(lambda *_: None)
            assert causal_mask(model, {**inputs, "use_cache": False}) is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append(model(**inputs).loss)
    assert torch.equal(*losses)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_host_does_not_wait_for_a_model(kind: str) -> None:
    model = converted(kind).cuda()
    inputs = {name: value.cuda() for name, value in make_batch(length=LENGTH).items()}
    optimizer = overcoat.AdamW(model.parameters())

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step(clip_grad_norm=1.0)
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with waiting_is_an_error():
        step()
    assert model(**inputs).loss.isfinite()
