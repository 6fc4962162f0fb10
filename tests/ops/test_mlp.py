"""`mlp_forward` and `mlp_backward` against FP64 autograd: `pytest tests/ops/test_mlp.py`."""

from __future__ import annotations

import pytest
import torch

import overcoat.ops.mlp as mlp_ops
from overcoat import Recipe
from overcoat.kernels.activation_functions import ACTIVATIONS
from tests.kernels.samples import normal
from tests.ops.harness import RECIPES, block_case, check, mlp_case, run

activations = pytest.mark.parametrize("activation", ACTIVATIONS)
gates = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
KINDS = [("silu", True), ("gelu_tanh", False)]
kinds = pytest.mark.parametrize(("activation", "gated"), KINDS)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@kinds
@pytest.mark.parametrize("quantized", [False, True], ids=["16 bits", "fp8"])
def test_mlp(recipe, activation, gated, quantized, device):
    check(mlp_case(device=device, activation=activation, gated=gated, quantized=quantized), recipe)


@activations
@gates
@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_every_activation(activation, gated, scaling, device):
    """256 columns are whole blocks, so that gate's and up's gradients go straight to FP8."""
    case = mlp_case(width=256, device=device, activation=activation, gated=gated, quantized=True)
    case.heavy = 1.5 if activation == "relu2" else 0.5
    case.sharing = 4 if activation == "relu2" else 1
    check(case, Recipe(linear_scaling=scaling))


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("width", [24, 130])
@kinds
def test_sizes(tokens, width, activation, gated, device):
    for bias, scaling in ((False, "tensor"), (True, "block")):
        case = mlp_case(tokens, width, bias, torch.float32, device, activation, gated)
        check(case, Recipe(linear_scaling=scaling))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("scaling", ["tensor", "block"])
@kinds
def test_non_finite_reaches_output_and_gradients(bad, scaling, activation, gated, device):
    for name in ("gate", "up")[: 1 + gated]:
        case = mlp_case(device=device, activation=activation, gated=gated)
        case.inputs[name][3, 5] = bad
        outputs, grads = run(case, Recipe(linear_scaling=scaling))
        assert not outputs[0][3].isfinite().any()
        assert not grads["weight"].isfinite().all()
        assert not grads["gate"].isfinite().all()


@kinds
@pytest.mark.parametrize("scaling", ["tensor", "block"])
def test_a_recomputation_gives_what_the_forward_has_kept(activation, gated, scaling, device):
    z, weight = normal(61, (1 + gated) * 200).to(device), normal(80, 200).to(device)
    recipe = Recipe(linear_scaling=scaling)
    y, saved = mlp_ops.mlp_forward(z, weight, None, None, activation, gated, recipe)
    assert y.dtype == z.dtype
    again = mlp_ops.mlp_recompute(z, saved.h_scale, saved.w_amax, activation, gated, recipe)
    for ours, theirs in zip(again, saved, strict=True):
        assert ours is theirs if theirs is None else torch.equal(ours.float(), theirs.float())


def test_without_a_residual_nothing_is_added():
    """In FP32: with one, in BF16, the product is rounded with it."""
    z, weight, residual = normal(7, 64), normal(16, 64), torch.zeros(7, 16)
    for recipe in (Recipe(), Recipe(linear_scaling="block")):
        plain, added = (mlp_ops.mlp_forward(z, weight, None, r, "silu", False, recipe)[0] for r in (None, residual))
        assert torch.equal(plain, added)


def test_unknown_activations_are_refused(device):
    x = torch.ones(2, 2, device=device)
    with pytest.raises(ValueError, match="'sigmoid' is not known; choose one of silu, "):
        mlp_ops.mlp_forward(x, x, None, x, "sigmoid", False, Recipe())


# ---- tests of the tests: one term dropped, or scaled by 0.95, must be seen ----------------------------------------


def spoil(monkeypatch, name, change):
    original = getattr(mlp_ops, name)
    monkeypatch.setattr(mlp_ops, name, lambda *args, **kwargs: change(*original(*args, **kwargs)))


@pytest.mark.parametrize("factor", [0.0, 0.95])
@pytest.mark.parametrize("half", ["gate", "up"])
def test_a_wrong_gradient_of_one_half_is_seen(half, factor, monkeypatch):
    def change(dz, h_t):
        dgate, dup = dz.chunk(2, 1)
        parts = (dgate * factor, dup) if half == "gate" else (dgate, dup * factor)
        return torch.cat(parts, 1), h_t

    spoil(monkeypatch, "activation_backward", change)
    with pytest.raises(AssertionError, match=f"d{half}"):
        check(mlp_case(), Recipe())


@pytest.mark.parametrize("factor", [0.0, 0.95])
@pytest.mark.parametrize("which", ["dweight", "dbias"])
def test_a_wrong_weight_or_bias_gradient_is_seen(which, factor, monkeypatch):
    if which == "dweight":
        spoil(monkeypatch, "wgrad", lambda *rows: torch.stack(rows) * factor)
    else:
        spoil(monkeypatch, "quantize_gradient", lambda *d: mlp_ops.Gradient(*d)._replace(sums=d[3] * factor))
    with pytest.raises(AssertionError, match=which):
        check(mlp_case(), Recipe())


def test_a_wrong_rebuilt_product_is_seen(monkeypatch):
    """h rebuilt with tokens shifted by one: every element plausible, the weight gradient noise."""

    def change(dz, h_t):
        return dz, h_t.view(torch.uint8).roll(1, 1).view(torch.float8_e4m3fn)

    spoil(monkeypatch, "activation_backward", change)
    with pytest.raises(AssertionError, match="dweight"):
        check(mlp_case(), Recipe())


@pytest.mark.parametrize(
    ("op", "place"), [("activation_backward_quantize", 3), ("activation_block_backward_quantize", 6)]
)
@pytest.mark.parametrize("factor", [0.0, 0.8])
@pytest.mark.parametrize("gelu", ["tanh", None])
def test_a_wrong_bias_gradient_of_the_first_projection_is_seen(op, place, factor, gelu, monkeypatch):
    """In a block the sums over tokens come from the pass that writes dz in FP8."""
    spoil(monkeypatch, op, lambda *r: (*r[:place], r[place] * factor, *r[place + 1 :]))
    recipe = Recipe(linear_scaling="block" if "block" in op else "tensor")
    with pytest.raises(AssertionError, match=r"d(up|gate)_bias"):
        check(block_case(biases=True, gelu=gelu, intermediate=384), recipe)
