"""The kernels of kernels/activation.py and activation_bound.py equal their references."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import activation as ops
from overcoat.kernels.activation_bound import activation_gradient_bound
from tests.kernels.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.activation_cases import block_cases, cases, dtypes, gradient, inputs, kinds, shapes

pytestmark = NEEDS_GPU

# Of 6 groups each: many programs at once on a GPU, one after another where they are interpreted.
MANY_ROWS = 10 if INTERPRETED else 300


@shapes
@cases
def test_forward(shape, code, group_size, activation, gated):
    for dtype in dtypes(shape):
        z = inputs(shape, gated, dtype)
        arguments = (z, activation, gated, code, group_size)
        theirs = ops.activation_encode.reference(*arguments)
        assert_equal(ops.activation_encode.kernel(*arguments), theirs)
        second = (z, theirs[2], activation, gated)
        assert_equal(ops.activation_quantize.kernel(*second), ops.activation_quantize.reference(*second))


@shapes
@block_cases
def test_block_forward(shape, code, group_size, activation, gated):
    for dtype in dtypes(shape):
        arguments = (inputs(shape, gated, dtype), activation, gated, code, group_size)
        ours = ops.activation_block_quantize.kernel(*arguments)
        assert_equal(ours, ops.activation_block_quantize.reference(*arguments))


@kinds
def test_strided_inputs_and_tiles_that_are_not_full(activation, gated):
    wide = awkward(9, 2000)
    for z in (wide, wide[:, :666], wide.t()[:30, :8]):
        top = z.abs().amax().float()
        arguments = (z, top, activation, gated)
        assert_equal(ops.activation_quantize.kernel(*arguments), ops.activation_quantize.reference(*arguments))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [5, 700 + 5], ids=["gate", "up"])
def test_no_bad_value_is_passed_over(value, column):
    """Small, in the last row, behind larger values: the maximum is what the reference says, NaN or infinite."""
    z = torch.full((MANY_ROWS, 1400), 1e-3, device=DEVICE)
    z[0] = 50.0
    z[-1, column] = value
    for activation, gated in (("silu", True), ("gelu", False)):
        arguments = (z, activation, gated, "sqrt8", 128)
        ours, theirs = ops.activation_encode.kernel(*arguments), ops.activation_encode.reference(*arguments)
        assert_equal(ours, theirs)
        assert (gated is False and value == -torch.inf) or not theirs[2].isfinite()


@pytest.mark.parametrize("gate", [-1.2784645, 4.0] if INTERPRETED else [-1.2784645, -1e30, 0.0, 1e-30, 4.0, 300.0])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_the_largest_product_is_found_wherever_it_is(gate, activation):
    """Also where it is barely larger than all others, and where the function is far below its group's bound."""
    for row in (0, MANY_ROWS - 1):
        z = torch.full((MANY_ROWS, 2 * 700), gate, device=DEVICE)
        z[:, 700:] = 1.0
        z[row, 700 + 69] = 1.0 + 2.0**-22
        arguments = (z, activation, True, "sqrt8", 128)
        assert_equal(ops.activation_encode.kernel(*arguments), ops.activation_encode.reference(*arguments))


# ---- the gradient's bound -------------------------------------------------------------------------------------------


def assert_same_bound(dh: torch.Tensor, z: torch.Tensor, activation: str, gated: bool, *how: object) -> torch.Tensor:
    group_amax = ops.activation_encode.reference(z, activation, gated, *how)[1]
    arguments = (dh, group_amax, activation, how[1])
    bound = activation_gradient_bound.reference(*arguments)
    assert_equal(activation_gradient_bound.kernel(*arguments), bound)
    return bound


@shapes
@cases
def test_bound(shape, code, group_size, activation, gated):
    for dtype in dtypes(shape):
        assert_same_bound(gradient(shape, dtype), inputs(shape, gated), activation, gated, code, group_size)


@pytest.mark.parametrize("value", [3e4, torch.nan, -torch.inf])
@pytest.mark.parametrize("where", ["dh", "gate", "up"])
@pytest.mark.parametrize(("activation", "gated", "first"), [("silu", True, 0), ("gelu", False, 0), ("relu2", True, 1)])
def test_the_last_group_counts(value, where, activation, gated, first):
    """Groups that lie in one piece, BF16 in pairs, either of which may hold the largest; not from an odd element on."""
    shape = (37, 512)
    z = torch.full((37, 512 * (1 + gated)), 0.5, device=DEVICE)
    dh = torch.zeros(first + 37 * 512, dtype=torch.bfloat16, device=DEVICE)[first:].view(shape)
    for column in (-1, -2):
        dh.copy_(gradient(shape))
        dh[-1, -2:] = 1.0
        if where == "dh":
            dh[-1, column] = value
        else:
            z[-1, column if where == "up" else 512 + column - z.shape[1]] = value
        bound = assert_same_bound(dh, z, activation, gated, "sqrt8", 128)
        assert value == 3e4 or not bound.isfinite()


def test_gradients_far_apart_in_size():
    """Rows from 1e-30 to 1e30."""
    z, sizes = torch.randn(200, 2 * 300, device=DEVICE), torch.logspace(-30, 30, 200, device=DEVICE)
    dh = torch.randn(200, 300, device=DEVICE) * sizes[torch.randperm(200, device=DEVICE), None]
    assert_same_bound(dh, z, "silu", True, "sqrt8", 128)
