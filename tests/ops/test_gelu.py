"""`gelu_linear` against FP64 autograd: `pytest tests/ops/test_gelu.py`."""

from __future__ import annotations

import pytest
import torch

import overcoat.ops.gelu as gelu_ops
from overcoat import Recipe
from tests.ops.harness import RECIPES, block_case, check, gelu_linear_case, run

forms = pytest.mark.parametrize("approximate", ["none", "tanh"])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@forms
def test_gelu_linear(recipe, approximate, device):
    check(gelu_linear_case(device=device, approximate=approximate), recipe)


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("width", [24, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_sizes(tokens, width, bias, device):
    check(gelu_linear_case(tokens, width, bias, torch.float32, device), Recipe())
    check(gelu_linear_case(tokens, width, bias, torch.float32, device), Recipe(linear_scaling="block"))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_non_finite_reaches_output_and_gradients(bad, scaling, device):
    case = gelu_linear_case(device=device)
    case.inputs["u"][3, 5] = bad
    outputs, grads = run(case, Recipe(linear_scaling=scaling))
    assert not outputs[0][3].isfinite().any()
    assert not grads["weight"].isfinite().all()
    assert not grads["u"].isfinite().all()


def test_unknown_forms_are_refused(device):
    with pytest.raises(ValueError, match="'sigmoid' is not known; choose 'none'"):
        gelu_ops.gelu_linear(*(torch.ones(2, 2, device=device) for _ in range(4)), Recipe(), "sigmoid")


# ---- tests of the tests: a result dropped, or scaled by 0.95, must be seen ------------------------------------------


@pytest.mark.parametrize("factor", [0.0, 0.95])
def test_a_wrong_input_gradient_is_seen(factor, monkeypatch):
    original = gelu_ops.gelu_backward

    def spoiled(*args):
        du, h_t = original(*args)
        return du * factor, h_t

    monkeypatch.setattr(gelu_ops, "gelu_backward", spoiled)
    with pytest.raises(AssertionError, match="du"):
        check(gelu_linear_case(), Recipe())


@pytest.mark.parametrize("factor", [0.0, 0.95])
@pytest.mark.parametrize("which", ["dweights", "dbiases"])
def test_a_wrong_weight_or_bias_gradient_is_seen(which, factor, monkeypatch):
    original = gelu_ops.gelu_linear_backward

    def spoiled(*args):
        du, grads = original(*args)
        return du, grads._replace(**{which: tuple(part * factor for part in getattr(grads, which))})

    monkeypatch.setattr(gelu_ops, "gelu_linear_backward", spoiled)
    with pytest.raises(AssertionError, match="dweight" if which == "dweights" else "dbias"):
        check(gelu_linear_case(), Recipe())


def test_a_wrong_rebuilt_product_is_seen(monkeypatch):
    """h rebuilt with tokens shifted by one: every element plausible, the weight gradient noise."""
    original = gelu_ops.gelu_backward

    def spoiled(*args):
        du, h_t = original(*args)
        return du, h_t.view(torch.uint8).roll(1, 1).view(torch.float8_e4m3fn)

    monkeypatch.setattr(gelu_ops, "gelu_backward", spoiled)
    with pytest.raises(AssertionError, match="dweight"):
        check(gelu_linear_case(), Recipe())


@pytest.mark.parametrize(("op", "place"), [("gelu_backward_quantize", 3), ("gelu_block_backward_quantize", 6)])
@pytest.mark.parametrize("factor", [0.0, 0.8])
def test_a_wrong_bias_gradient_of_the_first_projection_is_seen(op, place, factor, monkeypatch):
    """In a block the sums over tokens come from the pass that writes du in FP8."""
    original = getattr(gelu_ops, op)

    def spoiled(*args):
        results = original(*args)
        return *results[:place], results[place] * factor, *results[place + 1 :]

    monkeypatch.setattr(gelu_ops, op, spoiled)
    recipe = Recipe(linear_scaling="block" if "block" in op else "tensor")
    with pytest.raises(AssertionError, match="dup_bias"):
        check(block_case(biases=True, gelu="tanh"), recipe)
