"""`swiglu_linear` against FP64 autograd: `pytest tests/ops/test_mlp.py`."""

from __future__ import annotations

import pytest
import torch

import overcoat.ops.mlp as mlp_ops
from overcoat import Recipe
from tests.ops.harness import RECIPES, check, run, swiglu_linear_case


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_swiglu_linear(recipe, device):
    check(swiglu_linear_case(device=device), recipe)


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("width", [24, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_sizes(tokens, width, bias, device):
    check(swiglu_linear_case(tokens, width, bias, torch.float32, device), Recipe())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("half", ["gate", "up"])
def test_non_finite_reaches_output_and_gradients(half, bad, device):
    case = swiglu_linear_case(device=device)
    case.inputs[half][3, 5] = bad
    outputs, grads = run(case, Recipe())
    assert not outputs[0].isfinite().any()
    assert not grads["weight"].isfinite().all()
    assert not grads["gate"].isfinite().all()


# ---- tests of the tests: one term dropped, or scaled by 0.95, must be seen ----------------------------------------


@pytest.mark.parametrize("factor", [0.0, 0.95])
@pytest.mark.parametrize("half", ["gate", "up"])
def test_a_wrong_gradient_of_one_half_is_seen(half, factor, monkeypatch):
    original = mlp_ops.swiglu_backward

    def spoiled(*args):
        dgate_up, h_t = original(*args)
        dgate, dup = dgate_up.chunk(2, 1)
        parts = (dgate * factor, dup) if half == "gate" else (dgate, dup * factor)
        return torch.cat(parts, 1), h_t

    monkeypatch.setattr(mlp_ops, "swiglu_backward", spoiled)
    with pytest.raises(AssertionError, match=f"d{half}"):
        check(swiglu_linear_case(), Recipe())


@pytest.mark.parametrize("factor", [0.0, 0.95])
@pytest.mark.parametrize("which", ["dweights", "dbiases"])
def test_a_wrong_weight_or_bias_gradient_is_seen(which, factor, monkeypatch):
    original = mlp_ops.swiglu_linear_backward

    def spoiled(*args):
        dgate_up, grads = original(*args)
        return dgate_up, grads._replace(**{which: tuple(part * factor for part in getattr(grads, which))})

    monkeypatch.setattr(mlp_ops, "swiglu_linear_backward", spoiled)
    with pytest.raises(AssertionError, match="dweight" if which == "dweights" else "dbias"):
        check(swiglu_linear_case(), Recipe())


def test_a_wrong_rebuilt_product_is_seen(monkeypatch):
    """h rebuilt with tokens shifted by one: every element plausible, the weight gradient noise."""
    original = mlp_ops.swiglu_backward

    def spoiled(*args):
        dgate_up, h_t = original(*args)
        return dgate_up, h_t.view(torch.uint8).roll(1, 1).view(torch.float8_e4m3fn)

    monkeypatch.setattr(mlp_ops, "swiglu_backward", spoiled)
    with pytest.raises(AssertionError, match="dweight"):
        check(swiglu_linear_case(), Recipe())
