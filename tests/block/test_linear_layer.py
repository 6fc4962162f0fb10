"""A linear layer in FP8 by itself: against FP64, its saved input, compiled, under autocast."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor

from overcoat import Recipe, memory
from overcoat.block.linear_layer import SharedInput, linear_layer
from tests.emulation import sqnr
from tests.models.zoo import gradients

RECIPES = {"tensor": Recipe(), "block": Recipe(linear_scaling="block"), "paper": Recipe.paper()}


def holder(*parameters: Tensor) -> torch.nn.Module:
    """A module that owns parameters, which no report counts."""
    module = torch.nn.Module()
    for place, parameter in enumerate(parameters):
        module.register_parameter(str(place), torch.nn.Parameter(parameter.detach(), parameter.requires_grad))
    return module


def inputs(tokens: int = 37, dtype: torch.dtype = torch.bfloat16, outlier: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(2, tokens, 256, generator=generator)
    x[0, 0, 0] *= outlier
    parts = (x, torch.randn(320, 256, generator=generator) / 16, torch.randn(320, generator=generator))
    return [each.to(dtype).requires_grad_() for each in parts]


@pytest.mark.parametrize("outlier", [1.0, 50.0])
@pytest.mark.parametrize("tokens", [1, 37, 64])
@pytest.mark.parametrize("recipe", RECIPES)
def test_result_and_gradients(recipe: str, tokens: int, outlier: float) -> None:
    """E4M3 keeps 3 bits after the first: 31 dB and more for a sum of products; E5M2's 2 bits leave 25 dB and less."""
    x, weight, bias = inputs(tokens, outlier=outlier)
    y = linear_layer(x, weight, bias, RECIPES[recipe])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    found = torch.autograd.grad(y, (x, weight, bias), dy)
    exact = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    expected = exact[0] @ exact[1].t() + exact[2]
    assert y.dtype == x.dtype
    assert sqnr(expected, y) > 28
    for right, own in zip(torch.autograd.grad(expected, exact, dy.double()), found, strict=True):
        assert sqnr(right, own) > 22


def test_what_is_saved_is_one_byte_an_element_and_once() -> None:
    x, *parameters = inputs(64)
    module = holder(*parameters)
    weight, bias = module.parameters()
    shared, recipe = SharedInput(), Recipe()
    with memory.record_kept(module) as kept:
        first = linear_layer(x, weight, bias, recipe, shared)
        second = linear_layer(x, weight, None, recipe, shared)
    sizes = kept.by_tensor()
    assert sizes["linear", "codes"] == x.numel()
    assert kept.total_bytes - x.numel() <= 64  # scales and maxima
    alone = linear_layer(x, weight, bias, recipe)
    assert torch.equal(first, alone)
    assert torch.equal(second, linear_layer(x, weight, None, recipe))


def test_a_frozen_weight_saves_no_input() -> None:
    x, *parameters = inputs(64)
    module = holder(parameters[0].requires_grad_(False), parameters[1])
    weight, bias = module.parameters()
    with memory.record_kept(module) as kept:
        y = linear_layer(x, weight, bias, Recipe())
    assert kept.total_bytes <= 64
    y.sum().backward()
    assert weight.grad is None
    assert x.grad is not None


def test_another_tensor_is_quantized_anew() -> None:
    """The same object with other numbers, or another object in its place."""
    shared, recipe = SharedInput(), Recipe()
    x, weight, bias = (each.detach() for each in inputs(64))
    before = linear_layer(x, weight, bias, recipe, shared)
    x.mul_(2)
    after = linear_layer(x, weight, bias, recipe, shared)
    assert torch.equal(after, linear_layer(x, weight, bias, recipe))
    assert not torch.equal(before, after)
    assert torch.equal(
        linear_layer(x, weight, bias, RECIPES["block"], shared), linear_layer(x, weight, bias, RECIPES["block"])
    )
    del x, before, after
    gc.collect()
    assert shared._last is None  # nothing of it stays
    copy.deepcopy(shared)
    pickle.loads(pickle.dumps(shared))


@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_compiled(recipe: str) -> None:
    x, weight, bias = inputs(40)
    shared = SharedInput()

    def run(x: Tensor) -> Tensor:
        return linear_layer(x, weight, bias, RECIPES[recipe], shared) + linear_layer(
            x, weight, None, RECIPES[recipe], shared
        )

    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        y = function(x)
        results.append((y, *torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_autocast_says_the_dtype() -> None:
    x, weight, bias = inputs(24, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear_layer(x, weight, bias, Recipe())
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == weight.grad.dtype == torch.float32  # type: ignore[union-attr]


def test_a_checkpoint_repeats_the_numbers() -> None:
    from torch.utils.checkpoint import checkpoint

    module = torch.nn.Module()
    x, module.weight, module.bias = (torch.nn.Parameter(each.detach()) for each in inputs(48))
    results = []
    for through in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        shared = SharedInput()
        y = through(lambda x, s=shared: linear_layer(x, module.weight, module.bias, Recipe(), s), x)
        module.zero_grad()
        y.square().sum().backward()
        results.append(gradients(module))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])
