"""Norms before and after a branch, on their own against FP64: sharper than a block, whose products are noisy."""

from __future__ import annotations

import pytest
import torch

from overcoat import Recipe
from overcoat.block.norm import input_gradient, norm_after_forward
from overcoat.block.spec import Norm
from tests import exact
from tests.block.harness import FP32_DB
from tests.exact import BF16_DB, KEPT_DB, assert_close, combined_db
from tests.kernels.samples import normal

EPS = 1e-5
KINDS = {"rms": (True, False), "rms without weight": (False, False), "layer": (True, True), "layer bare": (False, True)}
kinds = pytest.mark.parametrize(("weighted", "centered"), KINDS.values(), ids=KINDS)


def made(tokens, hidden, weighted, centered, device, dtype=torch.float32):
    """x, y's residual and gradient, the norm."""
    x, residual, dy = (normal(tokens, hidden, seed=seed).to(device, dtype) for seed in range(3))
    weight = (1 + 0.3 * normal(hidden, seed=4)).to(device, dtype) if weighted else None
    bias = (0.3 * normal(hidden, seed=5)).to(device, dtype) if weighted and centered else None
    return 2 * x + 0.5, residual, dy, Norm(weight, bias, EPS, centered)


def truth(x, dy, norm):
    """Output, and gradients of x, weight and bias, in FP64."""
    leaves = [None if t is None else t.double().requires_grad_() for t in (x, norm.weight, norm.bias)]
    y = exact.norm(*leaves, EPS, norm.centered)
    y.backward(dy.double())
    return y.detach(), *(None if t is None else t.grad for t in leaves)


@pytest.mark.parametrize(("tokens", "hidden"), [(61, 256), (1, 24), (7, 130), (64, 512)])
@kinds
def test_after(tokens, hidden, weighted, centered, device):
    """The sum to FP32's rounding; gradients to that of the kept codes (a term that is 5% off is seen at 26 dB)."""
    x, residual, dy, norm = made(tokens, hidden, weighted, centered, device)
    recipe = Recipe(kept_format="int8")
    total, saved = norm_after_forward(x, residual, norm, recipe)
    y, dx, dweight, dbias = truth(x, dy, norm)
    assert_close("sum", residual.double() + y, total, FP32_DB)
    found, gradients, top = input_gradient(dy, None, saved, norm, recipe)
    limit = combined_db(KEPT_DB["int8"], KEPT_DB["int8"])
    assert_close("dx", dx, found, limit)
    assert top == found.abs().max()
    assert (gradients.weight is None) == (dweight is None)
    assert (gradients.bias is None) == (dbias is None)
    if dweight is not None:
        assert_close("dweight", dweight, gradients.weight, limit)
    if dbias is not None:
        assert_close("dbias", dbias, gradients.bias, FP32_DB)
    with_residual, _, _ = input_gradient(dy, residual, saved, norm, recipe)
    torch.testing.assert_close(with_residual - found, residual, atol=1e-5, rtol=1e-5)


def test_the_sum_after_a_norm_is_rounded_once(device):
    """The norm's output is not rounded before the residual is added to it."""
    x, residual, dy, norm = made(61, 256, True, False, device, torch.bfloat16)
    total, _ = norm_after_forward(x, 0.01 * residual, norm, Recipe())
    y, *_ = truth(x, dy, norm)
    assert_close("sum", 0.01 * residual.double() + y, total, BF16_DB)
    assert total.dtype == torch.bfloat16
