"""Ranges of FP8 operands: counted as they are, named after their weights, with no bit of the training moved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import overcoat
from overcoat import Recipe
from overcoat.formats import FLOAT8, quantize_tensor
from overcoat.models.family import decoder_layers
from tests.models.zoo import make_batch, make_model
from tests.processes import on_two

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


def _shard(rank: int) -> None:
    model, inputs = make_model("llama", layers=2), make_batch("causal")
    overcoat.convert(model)
    for layer in decoder_layers(model).values():
        fully_shard(layer)
    fully_shard(model)
    found = step(model, inputs, record=rank == 0)
    if dist.get_rank() == 0:
        assert all(sorted(products) == sorted(PRODUCTS) for products in found.values())
        assert all("gradient" in operands for products in found.values() for operands in products.values())
        assert len(found) == 2


def test_gathered_weights_keep_their_names():
    on_two(_shard, "cpu")
