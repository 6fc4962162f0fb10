"""The output gate's ops against FP64 autograd, and their kernels against them: `pytest tests/kernels/test_gate.py`."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels.gate import gate, gate_backward
from overcoat.kernels.quantize import amax
from tests.exact import assert_close_float32, leaf
from tests.kernels.compare import AWKWARD_SHAPES, DEVICE, assert_equal, awkward
from tests.kernels.samples import normal

# Operations in a row: exp2, a reciprocal, two sums and three products.
TERMS = 12
BAD = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("tokens", [1, 7, 61])
def test_values_and_gradients(tokens, device):
    """Gates of both signs, as far as sigmoid is 0 or 1."""
    o, dh = (normal(tokens, 200, seed=seed).to(device) for seed in (1, 2))
    g = 8 * normal(tokens, 200).to(device)
    exact = [leaf(o), leaf(g)]
    truth = exact[0] * torch.sigmoid(exact[1])
    do, dg = torch.autograd.grad(truth, exact, dh.double())
    h, top = gate(o, g)
    assert_close_float32("h", truth.detach(), h, TERMS)
    assert top == h.abs().amax()
    for name, expected, found in zip(("do", "dg"), (do, dg), gate_backward(dh, o, g), strict=True):
        assert_close_float32(name, expected, found, TERMS)


def test_the_maximum_is_that_of_what_is_rounded(device):
    """So that the FP8 operand made of h fills its format and saturates nothing."""
    o, g = normal(61, 200, dtype=torch.bfloat16).to(device), normal(61, 200, dtype=torch.bfloat16, seed=1).to(device)
    h, top = gate(o, g)
    assert (h.dtype, top.dtype, top.shape) == (torch.bfloat16, torch.float32, ())
    assert top == h.float().abs().max()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["o", "g", "dh"])
def test_what_is_not_finite_reaches_the_results(where, bad, device):
    """But a gate of -inf, which is shut, and one of +inf, which is open, and where gradients end."""
    parts = {name: normal(4, 32, seed=seed).to(device) for seed, name in enumerate(("o", "g", "dh"))}
    parts[where][2, 5] = bad
    h, top = gate(parts["o"], parts["g"])
    do, dg = gate_backward(parts["dh"], parts["o"], parts["g"])
    reaches = where == "o" or bad != bad
    assert top.isfinite() == h.isfinite().all() == (where == "dh" or not reaches)
    assert dg.isfinite().all() == (not reaches and where == "g")
    assert do.isfinite().all() == (where == "o" or (where == "g" and not reaches))


# ---- kernels -----------------------------------------------------------------------------------------------------


def assert_same(o, g):
    """The maximum is that of the kernel's own h, of which the interpreter rounds a few elements otherwise."""
    h, top = gate.kernel(o, g)
    assert_equal(h, gate.reference(o, g)[0])
    assert_equal(top, amax.reference(h))
    dh = awkward(*o.shape, o.dtype, seed=3).clamp(-50, 50)
    assert_equal(gate_backward.kernel(dh, o, g), gate_backward.reference(dh, o, g))


@pytest.mark.kernel
@pytest.mark.parametrize("shape", AWKWARD_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels(shape, dtype):
    assert_same(*(awkward(*shape, dtype, seed=seed).clamp(-50, 50) for seed in range(2)))


@pytest.mark.kernel
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("which", [0, 1], ids=["o", "g"])
def test_no_bad_value_is_passed_over_in_the_kernels(which, bad):
    """In the last program, behind larger values."""
    parts = [torch.full((10, 700), 1e-3, device=DEVICE) for _ in range(2)]
    parts[0][0], parts[which][-1, 5] = 50.0, bad
    assert_same(*parts)
