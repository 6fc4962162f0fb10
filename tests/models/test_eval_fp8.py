"""FP8 in `eval()`, for a reference model that computes what the policy does: `pytest tests/models/test_eval_fp8.py`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overcoat
from overcoat import Recipe
from overcoat.formats import FLOAT8, quantize_tensor
from overcoat.models.family import decoder_layers
from overcoat.models.recording import Ranges
from tests.models.zoo import make_batch, make_model


def log_probabilities(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Of each token, as DPO and GRPO compute them."""
    inputs = {name: x for name, x in inputs.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)


def pair(kind: str = "llama", recipe: Recipe | None = None) -> tuple[nn.Module, nn.Module, overcoat.Report]:
    """A policy that trains and its reference, of equal weights."""
    policy = make_model(kind, layers=2)
    reference = copy.deepcopy(policy)
    overcoat.convert(policy, recipe)
    report = overcoat.convert(reference, recipe, eval_fp8=True)
    return policy.train(), reference.eval().requires_grad_(False), report


@pytest.mark.parametrize(
    ("kind", "mask", "recipe"),
    [
        *(("llama", mask, Recipe()) for mask in ("causal", "packed", "left-padded", "right-padded")),
        ("llama", "causal", Recipe.leanest()),
        ("llama", "packed", Recipe(linear_scaling="block")),
        ("gemma2", "right-padded", Recipe()),
        ("mixtral", "causal", Recipe()),
    ],
)
def test_the_margin_is_zero_at_the_first_step(kind: str, mask: str, recipe: Recipe, device: torch.device) -> None:
    policy, reference, report = pair(kind, recipe)
    inputs = {name: x.to(device) for name, x in make_batch(mask).items()}
    policy, reference = policy.to(device), reference.to(device)
    with torch.no_grad():
        theirs = log_probabilities(reference, inputs)
    ours = log_probabilities(policy, inputs)
    assert torch.equal(ours, theirs)
    assert ours.requires_grad
    assert [ran for ran in report.running().values() if ran != "all logits"] == ["FP8"] * 2
    with torch.inference_mode():
        assert torch.equal(log_probabilities(reference, inputs), ours)


def test_without_it_the_two_differ_and_converting_again_takes_it_back() -> None:
    policy, reference, report = pair()
    plain, inputs = make_model("llama", layers=2).eval(), make_batch()
    assert "in eval() too" in report.layers[0].detail
    report = overcoat.convert(reference)
    assert "eval()" not in report.layers[0].detail
    with torch.no_grad():
        bf16 = log_probabilities(reference, inputs)
        assert torch.equal(bf16, log_probabilities(plain, inputs))
        assert not torch.equal(bf16, log_probabilities(policy, inputs))
    assert report.running()["model.layers.0"] == "eval(): the original forward"


def test_no_cache_unless_asked_for_and_generate_is_the_original() -> None:
    """With a cache the layers run as they are, and say so: tokens are those of a model that was not converted."""
    _, reference, report = pair()
    plain, inputs = make_model("llama", layers=2).eval(), make_batch()
    with torch.no_grad():
        assert reference(input_ids=inputs["input_ids"]).past_key_values is None
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with pytest.warns(UserWarning, match=r"computes in its original precision: .*use_cache=True"):
        tokens = reference.generate(inputs["input_ids"], **options)
    assert torch.equal(tokens, plain.generate(inputs["input_ids"], **options))
    assert "cache was asked for" in report.running()["model.layers.1"]
    assert reference.generate(inputs["input_ids"], use_cache=False, **options).shape == tokens.shape
    assert report.running()["model.layers.1"] == "FP8"


# ---- Ranges of FP8 operands: counted as they are, named after their weights, with no bit of the training moved ------


PRODUCTS = ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"]


def step(model, inputs, record):
    model.zero_grad()
    if not record:
        model(**inputs, use_cache=False).loss.backward()
        return {}
    with overcoat.record_ranges(model) as ranges:
        model(**inputs, use_cache=False).loss.backward()
    return ranges.by_layer


@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe.paper(), Recipe.leanest(), Recipe(linear_scaling="block")], ids=str
)
def test_every_product_of_every_layer_is_there_and_nothing_moves(recipe):
    model, inputs = make_model("llama", layers=2), make_batch("causal")
    overcoat.convert(model, recipe)
    step(model, inputs, False)
    expected = [p.grad.clone() for p in model.parameters()]
    found = step(model, inputs, True)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected))
    assert list(found) == list(decoder_layers(model))
    for products in found.values():
        assert sorted(products) == sorted(PRODUCTS)
        for operands in products.values():
            assert sorted(operands) == ["gradient", "input", "weight"]
            assert all(0 <= r.saturated < 0.1 and 0 <= r.zero < 0.5 and r.limit > 0 for r in operands.values())


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_shares_are_those_of_the_codes(fmt):
    """Known tensors: a weight of 8 elements of which 2 are the largest, of either sign, and 3 zero or underflowed."""
    model = make_model("llama", layers=1)
    overcoat.convert(model)
    (name, layer), *_ = decoder_layers(model).items()
    x = torch.tensor([[4.0, -4.0, 1.0, 0.5, 0.0, -0.0, 1e-12, 2.0]])
    codes, scale = quantize_tensor(x, FLOAT8[fmt], x.abs().max())
    with overcoat.record_ranges(model) as ranges:
        ranges.enter(layer)
        ranges.saw("weight", (layer.mlp.down_proj.weight,), codes, scale)
        ranges.saw("weight", (torch.ones(1),), codes, scale)  # of nobody's
    assert list(ranges.by_layer) == [name]
    assert ranges.by_layer[name]["down_proj"]["weight"] == (0.25, 0.375, pytest.approx(4.0))


def test_rows_of_zeros_alone_have_not_underflowed() -> None:
    """Of gradients of tokens without labels, say: three rows of four, of which the fourth underflows in part."""
    weight = nn.Linear(4, 4).weight
    ranges = Ranges()
    ranges._weights[id(weight)] = ("layer", "proj")
    codes = torch.zeros(4, 4, dtype=torch.uint8)
    codes[3] = torch.tensor([0x7E, 0, 1, 2])
    ranges.saw("gradient", (weight,), codes.view(torch.float8_e4m3fn), torch.ones(()))
    found = ranges.by_layer["layer"]["proj"]["gradient"]
    assert (found.saturated, found.zero, found.limit) == (0.25, 0.25, 448.0)
