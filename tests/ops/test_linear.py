"""`norm_linear` and `linear_residual` against FP64 autograd: `pytest tests/ops/test_linear.py`."""

from __future__ import annotations

import pytest
import torch

import overcoat.ops.linear as linear_ops
from overcoat import Recipe
from tests.exact import assert_close
from tests.ops.harness import RECIPES, check, double, evaluate, linear_residual_case, norm_linear_case, run

recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
KINDS = ["rms", "rms without weight", "layer", "layer without parameters"]


@recipes
@pytest.mark.parametrize("kind", KINDS)
def test_norm_linear(kind, recipe, device):
    check(norm_linear_case(kind=kind, biases=True, device=device), recipe)


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("hidden", [24, 130, 256])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_linear_sizes(tokens, hidden, kind, device):
    """One token, padding of the tokens for wgrad, widths that fit no group. FP32, so that nothing else rounds."""
    check(norm_linear_case(tokens, hidden, kind, biases=True, dtype=torch.float32, device=device), Recipe())


@recipes
def test_linear_residual(recipe, device):
    check(linear_residual_case(device=device), recipe)


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_residual_sizes(tokens, bias, device):
    check(linear_residual_case(tokens, 64, bias, torch.float32, device), Recipe())


def test_norm_weight_gradients_where_the_weight_is_tiny(device):
    """NUMERICS.md section 4: at least 20 dB where the weight is 0, 1e-4 or 10. y / w would be noise or lost there."""
    case = norm_linear_case(hidden=512, device=device)
    sizes = torch.tensor([0.0, 1e-4, 1.0, 10.0], device=device)
    case.inputs["norm_weight"] = sizes.repeat(128).to(torch.bfloat16)
    for recipe in (Recipe(), Recipe.paper()):
        _, grads = run(case, recipe)
        _, truth = evaluate(case.truth, double(case.inputs), case.names(), list(case.grads))
        for i, size in enumerate(sizes.tolist()):
            got, exact = grads["norm_weight"][i::4], truth["norm_weight"][i::4]
            assert exact.count_nonzero() == 128
            # dgrad's noise, whatever the weight: assert_close takes off what 128 elements leave uncertain.
            assert_close(f"dweight at {size}", exact, got, case.limits(recipe)["norm_weight"])
            assert float(20 * torch.log10(exact.norm() / (exact - got.double()).norm())) >= 20


# ---- tests of the tests: one term dropped, or scaled by 0.95, must be seen ----------------------------------------


@pytest.mark.parametrize("factor", [0.0, 0.95])
@pytest.mark.parametrize("index", [0, 1, 2], ids=["dx", "norm weight", "norm bias"])
def test_a_wrong_norm_backward_is_seen(index, factor, monkeypatch):
    original = linear_ops.norm_backward

    def spoiled(*args):
        results = list(original(*args))
        results[index] = results[index] * factor
        return tuple(results)

    monkeypatch.setattr(linear_ops, "norm_backward", spoiled)
    with pytest.raises(AssertionError, match=["dx", "dnorm_weight", "dnorm_bias"][index]):
        check(norm_linear_case(kind="layer", biases=True), Recipe())


@pytest.mark.parametrize("factor", [0.0, 0.95])
def test_a_wrong_residual_gradient_is_seen(factor, monkeypatch):
    original = linear_ops.norm_backward

    def spoiled(*args):
        args = list(args)
        args[5] = args[5] * factor
        return original(*args)

    monkeypatch.setattr(linear_ops, "norm_backward", spoiled)
    with pytest.raises(AssertionError, match="dx"):
        check(norm_linear_case(), Recipe())


@pytest.mark.parametrize("factor", [0.0, 0.95])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("which", ["dweights", "dbiases"])
def test_a_wrong_weight_or_bias_gradient_is_seen(which, layer, factor, monkeypatch):
    original = linear_ops.product_backward

    def spoiled(*args):
        grads = original(*args)
        parts = list(getattr(grads, which))
        if parts[layer] is None:
            parts[layer] = grads.dweights[layer].sum(1)  # a gradient for a bias that is not there
        else:
            parts[layer] = parts[layer] * factor
        return grads._replace(**{which: tuple(parts)})

    monkeypatch.setattr(linear_ops, "product_backward", spoiled)
    if which == "dbiases" and layer == 1:
        with pytest.raises(RuntimeError, match="gradient"):  # autograd itself objects
            check(norm_linear_case(biases=True), Recipe())
    else:
        with pytest.raises(AssertionError, match=f"d{which[1:-2] if which == 'dbiases' else 'weight'}"):
            check(norm_linear_case(biases=True), Recipe())


@pytest.mark.parametrize("op", ["requantize_t", "quantize_t"])
def test_a_wrong_wgrad_operand_is_seen(op, monkeypatch):
    """Its rows in another order (tokens shifted by one): every element plausible, the gradient noise."""
    original = getattr(linear_ops, op)
    monkeypatch.setattr(
        linear_ops, op, lambda *args: original(*args).view(torch.uint8).roll(1, 1).view(torch.float8_e4m3fn)
    )
    with pytest.raises(AssertionError, match="dweight"):
        check(norm_linear_case() if op == "requantize_t" else linear_residual_case(), Recipe())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_reaches_output_and_gradients(bad, device):
    """It must reach the loss, and through the gradients found_inf; nothing clamps it away."""
    for case in (norm_linear_case(device=device), linear_residual_case(device=device)):
        case.inputs["x"][3, 5] = bad
        outputs, grads = run(case, Recipe())
        assert not outputs[0].isfinite().any()
        assert not grads["weight0" if "weight0" in grads else "weight"].isfinite().all()
