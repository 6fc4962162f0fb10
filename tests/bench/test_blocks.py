"""Who takes part in `bench layer`: what is converted, compiled and called, and under which attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overcoat import Recipe
from overcoat.bench import blocks
from overcoat.bench.blocks import CUDNN_FIRST, OUR_RECIPES, convert_all, make_block, makers, named_gradients
from overcoat.bench.layer import sqnr
from overcoat.bench.shapes import BlockShape, ModelShape, build_block, build_model
from tests.bench.peers import module

SHAPE = BlockShape(ModelShape(128, 256, 1, 4, 2, 32), 2, 16)


def test_attention_backends_in_another_order_give_the_same() -> None:
    outputs = []
    for attention in ("default", "cudnn"):
        model, tables = build_block(SHAPE, torch.float32, "cpu")
        block = make_block("bf16 eager", model, tables, compiled=False, attention=attention)
        outputs.append(block.call(torch.ones(1, SHAPE.sequence, SHAPE.model.hidden)))
    assert sqnr(*outputs) > 80


@pytest.mark.parametrize("name", [name for name, maker in makers().items() if not maker.needs])
def test_only_pytorchs_own_attention_is_given_an_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[Any] = []
    original = blocks.sdpa_kernel

    def recorded(order: Any, set_priority: bool) -> Any:
        orders.append((order, set_priority))
        return original(order, set_priority=set_priority)

    monkeypatch.setattr(blocks, "sdpa_kernel", recorded)
    for attention in ("default", "cudnn"):
        model, tables = build_block(SHAPE, torch.bfloat16, "cpu")
        block = make_block(name, model, tables, compiled=False, attention=attention)
        block.call(torch.ones(1, SHAPE.sequence, SHAPE.model.hidden, dtype=torch.bfloat16))
    assert orders == ([(CUDNN_FIRST, True)] if name.startswith("bf16") else [])


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_compile_where_it_is_part_of_the_name(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its gradients are those of the layer, not under the compiled module's names."""
    wrapped: list[tuple[Any, str]] = []

    def compile_(layer: Any, mode: str) -> Any:
        wrapped.append((layer, mode))
        return layer

    monkeypatch.setattr(torch, "compile", compile_)
    for name in ("overcoat", "bf16 eager", "overcoat compile", "bf16 compile", "bf16 compile, graphs"):
        model, tables = build_block(SHAPE, torch.bfloat16, "cpu")
        block = make_block(name, model, tables, compiled=compiled, attention="default")
        mode = "reduce-overhead" if "graphs" in name else "default"
        assert wrapped == ([(model.layers[0], mode)] if compiled and "compile" in name else []), name
        assert block.module is model.layers[0]
        wrapped.clear()


def test_pytorchs_checkpoint_runs_the_forward_again() -> None:
    """All of it, to the same gradients."""
    found = {}
    for name in ("overcoat", "overcoat torch checkpoint"):
        torch.manual_seed(0)
        model, tables = build_block(SHAPE, torch.bfloat16, "cpu")
        block = make_block(name, model, tables, compiled=False, attention="default")
        layer, calls = model.layers[0], list[None]()

        def forward(*args: Any, forward: Any = layer.forward, calls: list[None] = calls, **kwargs: Any) -> Any:
            calls.append(None)
            return forward(*args, **kwargs)

        layer.forward = forward
        torch.manual_seed(1)
        x = torch.randn(1, SHAPE.sequence, SHAPE.model.hidden, dtype=torch.bfloat16, requires_grad=True)
        block.call(x).sum().backward()
        found[name] = len(calls), x.grad
    (once, dx), (twice, again) = found.values()
    assert (once, twice) == (1, 2)
    assert torch.equal(dx, again)


def test_the_recipe_is_the_one_of_the_name() -> None:
    assert OUR_RECIPES["overcoat"] == Recipe()
    for name, recipe in OUR_RECIPES.items():
        model, tables = build_block(SHAPE, torch.bfloat16, "cpu")
        make_block(name, model, tables, compiled=False, attention="default")
        assert model.layers[0].overcoat_recipe == recipe, name


def test_everyone_needs_the_packages_of_the_name() -> None:
    packages = {"torchao": "torchao", "transformer engine": "transformer_engine"}
    for name, maker in makers().items():
        assert set(maker.needs) == {package for word, package in packages.items() if word in name}, name
        assert maker.compiles is ("compile" in name), name


def test_torchao_converts_the_layer_under_the_recipe_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        from_recipe_name = "config {}".format

    def convert(layer: Any, config: Any) -> Any:
        return layer, config

    module(monkeypatch, "torchao")
    module(monkeypatch, "torchao.float8", Float8LinearConfig=Config, convert_to_float8_training=convert)
    for recipe in ("tensorwise", "rowwise"):
        model, _ = build_block(SHAPE, torch.bfloat16, "cpu")
        made = makers()[f"torchao {recipe}, compile"].make(model)
        assert made == (model.layers[0], f"config {recipe}")


class Tuples(nn.Module):
    """A decoder layer as older transformers have it: of several results the first."""

    def forward(self, x: Tensor, attention_mask: None, position_embeddings: Any) -> tuple[Tensor, str]:
        assert attention_mask is None
        return x + position_embeddings[0], "weights"


def test_of_several_results_the_first_is_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "makers", lambda: {"old": blocks.Maker(lambda _: Tuples())})
    block = make_block("old", None, (torch.tensor(2.0), torch.tensor(0.0)), compiled=True, attention="cudnn")
    assert block.call(torch.tensor(1.0)) == 3.0
    assert block.gradients() == {}


def test_gradients_there_are() -> None:
    layer = nn.Linear(2, 3)
    layer.bias.requires_grad_(False)
    layer(torch.ones(1, 2)).sum().backward()
    assert set(named_gradients(layer)) == {"weight"}


@pytest.mark.parametrize("part", ["layer", "head"])
def test_what_convert_leaves_alone_is_no_contestant(part: str) -> None:
    model: Any = build_model(ModelShape(128, 256, 2, 4, 2, 32), torch.bfloat16, "cpu")
    changed = model.model.layers[1] if part == "layer" else model
    changed.forward = changed.forward  # somebody's own
    with pytest.raises(ValueError, match="not converted:\nlayer  "):
        convert_all(model, Recipe())
