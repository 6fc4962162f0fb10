"""The kernels of kernels/gpu/gelu.py and gelu_blockwise.py equal their references.

The sums over tokens add in another order than PyTorch's: they agree to rounding.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import gelu as ops
from overcoat.kernels import gelu_blockwise as block_ops
from overcoat.kernels.quantize import amax
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward

pytestmark = NEEDS_GPU

SHAPES = [(1, 16), (7, 100), (130, 200)]
SHAPES += [] if INTERPRETED else [(1000, 12288), (300, 17920)]
GROUPS = [("sqrt8", 128), ("e4m3", 16), ("int8", 80)]
BLOCK_GROUPS = [("sqrt8", 128), ("e4m3", 16), ("int8", 64)]

forms = pytest.mark.parametrize("approximate", ["none", "tanh"])
shapes = pytest.mark.parametrize("shape", SHAPES)
formats = pytest.mark.parametrize("fmt", ["e5m2", "e4m3"])


def gradient(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """With a column of ones, whose sum is that of the derivatives, and a row of zeros."""
    dh = awkward(*shape, dtype, seed=1).clamp(-50, 50)
    dh[:, 0] = 1.0
    return dh


@shapes
@pytest.mark.parametrize(("code", "group_size"), GROUPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@forms
def test_forward(shape, code, group_size, dtype, approximate):
    u = awkward(*shape, dtype)
    theirs = ops.gelu_encode.reference(u, approximate, code, group_size)
    assert_equal(ops.gelu_encode.kernel(u, approximate, code, group_size), theirs)
    top = amax.reference(theirs[2])
    assert_equal(ops.gelu_quantize.kernel(u, top, approximate), ops.gelu_quantize.reference(u, top, approximate))


@shapes
@pytest.mark.parametrize(("code", "group_size"), GROUPS)
@formats
@forms
def test_backward(shape, code, group_size, fmt, approximate):
    codes, group_amax, row_amax = ops.gelu_encode.reference(awkward(*shape), approximate, code, group_size)
    scale = amax.reference(row_amax) / 448
    arguments, how = (gradient(shape), codes, group_amax), (approximate, code, group_size)
    ours = ops.gelu_backward.kernel(*arguments, scale, *how)
    assert_equal(ours, ops.gelu_backward.reference(*arguments, scale, *how))
    first = ops.gelu_backward_amax.reference(*arguments, scale, *how)
    assert_equal(ops.gelu_backward_amax.kernel(*arguments, scale, *how), first)
    for has_bias in (True, False):
        *ours, sums = ops.gelu_backward_quantize.kernel(*arguments, first[0], fmt, has_bias, *how)
        *theirs, expected = ops.gelu_backward_quantize.reference(*arguments, first[0], fmt, has_bias, *how)
        assert_equal(ours, theirs)
        assert_equal(sums, expected, exact=False, steps=8)


@shapes
@pytest.mark.parametrize(("code", "group_size"), BLOCK_GROUPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@forms
def test_block_forward(shape, code, group_size, dtype, approximate):
    arguments = (awkward(*shape, dtype), approximate, code, group_size)
    assert_equal(block_ops.gelu_block_quantize.kernel(*arguments), block_ops.gelu_block_quantize.reference(*arguments))


@shapes
@pytest.mark.parametrize(("code", "group_size"), BLOCK_GROUPS)
@formats
@forms
def test_block_backward(shape, code, group_size, fmt, approximate):
    kept = block_ops.gelu_block_quantize.reference(awkward(*shape), approximate, code, group_size)[2:]
    arguments, how = (gradient(shape), *kept), (approximate, code, group_size)
    ours = block_ops.gelu_block_backward.kernel(*arguments, *how)
    assert_equal(ours, block_ops.gelu_block_backward.reference(*arguments, *how))
    for has_bias in (True, False):
        *ours, sums = block_ops.gelu_block_backward_quantize.kernel(*arguments, fmt, has_bias, *how)
        *theirs, expected = block_ops.gelu_block_backward_quantize.reference(*arguments, fmt, has_bias, *how)
        assert_equal(ours, theirs)
        assert_equal(sums, expected, exact=False, steps=8)


@forms
def test_extremes_and_what_is_not_finite(approximate):
    """Squares and cubes that overflow give no NaN; NaN and infinities reach the row's and the group's maximum."""
    u = torch.zeros(4, 256, device=DEVICE)
    u[0, :4] = torch.tensor([3e38, -3e38, 2e19, -2e19])
    u[1, 3], u[2, 200], u[3, 200] = torch.nan, torch.inf, 1.0
    _, group_amax, row_amax = ops.gelu_encode.kernel(u, approximate, "sqrt8", 128)
    assert row_amax.isfinite().tolist() == [True, False, False, True]
    assert row_amax[0].item() == u[0, 0].item()
    assert group_amax.isfinite().tolist() == [[True, True], [False, True], [True, False], [True, True]]
    codes, group_amax, row_amax = ops.gelu_encode.kernel(u[:1], approximate, "sqrt8", 128)
    dh, scale = torch.ones_like(u[:1]), row_amax[0] / 448
    du, _ = ops.gelu_backward.kernel(dh, codes, group_amax, scale, approximate, "sqrt8", 128)
    torch.testing.assert_close(du[0, :2].cpu(), torch.tensor([1.0, 0.0]), rtol=0, atol=1e-6)


def test_unknown_forms_are_refused():
    with pytest.raises(ValueError, match="'sigmoid' is not known; choose 'none'"):
        ops.gelu_encode.kernel(torch.zeros(2, 16, device=DEVICE), "sigmoid", "sqrt8", 16)
