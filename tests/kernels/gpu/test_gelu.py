"""The kernels of kernels/gpu/gelu.py, gelu_backward.py and gelu_blockwise.py equal their references.

The sums over tokens add in another order than PyTorch's: they agree to rounding.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import gelu as ops
from overcoat.kernels import gelu_blockwise as block_ops
from overcoat.kernels.gpu import gelu_backward as gpu
from overcoat.kernels.gpu.common import EXACT
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
    top = ops.gelu_backward_amax.reference(*arguments, *how)
    assert_equal(ops.gelu_backward_amax.kernel(*arguments, *how), top)
    for has_bias in (True, False):
        both = (*arguments, scale, top, fmt, has_bias, *how)
        *ours, sums, h_t = ops.gelu_backward_quantize.kernel(*both)
        *theirs, expected, expected_h = ops.gelu_backward_quantize.reference(*both)
        assert_equal([*ours, h_t], [*theirs, expected_h])
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


def assert_same_largest_gradient(
    dh: torch.Tensor, codes: torch.Tensor, group_amax: torch.Tensor, how: tuple[str, str, int]
) -> torch.Tensor:
    largest = ops.gelu_backward_amax.reference(dh, codes, group_amax, *how)
    assert_equal(ops.gelu_backward_amax.kernel(dh, codes, group_amax, *how), largest)
    return largest


@pytest.mark.parametrize("value", [1.4157, -1.4157, 0.75, 0.0, -0.5, -30.0, 30.0])
@forms
def test_a_tile_with_the_largest_gradient_is_never_passed_over(value, approximate):
    """Also where another program has found one barely smaller, and where the derivative comes closest to its bound."""
    codes, group_amax, _ = ops.gelu_encode.reference(torch.full((5, 700), value, device=DEVICE), "none", "int8", 128)
    dh = torch.ones(5, 700, device=DEVICE)
    largest = assert_same_largest_gradient(dh, codes, group_amax, (approximate, "int8", 128))
    # 32 steps of FP32 below the true maximum.
    below = torch.tensor(max(largest.view(torch.int32).item() - 32, 0), dtype=torch.int32, device=DEVICE)
    top = below.clone()
    gpu._gelu_gradient_amax_kernel[(2,)](
        dh, codes, group_amax, top, 30, 6, 700, approximate == "tanh", 128, 128, 2, 16, num_warps=4, **EXACT
    )
    raised = top.view(torch.float32)
    assert (raised - largest).abs() <= 4e-6 * largest if INTERPRETED else raised == largest
    assert raised > below.view(torch.float32) or largest == 0


def test_gradients_far_apart_in_size():
    """Rows from 1e-30 to 1e30: most tiles are passed over, none that matters."""
    codes, group_amax, _ = ops.gelu_encode.reference(torch.randn(200, 300, device=DEVICE), "none", "sqrt8", 128)
    sizes = torch.logspace(-30, 30, 200, device=DEVICE)[torch.randperm(200, device=DEVICE)]
    dh = torch.randn(200, 300, device=DEVICE) * sizes[:, None]
    assert_same_largest_gradient(dh, codes, group_amax, ("none", "sqrt8", 128))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["dh", "u"])
@pytest.mark.parametrize("group_size", [16, 80, 128])
@forms
def test_no_single_bad_value_is_passed_over(value, where, group_size, approximate):
    """In the last row behind larger values, dh zero where u is bad: the maximum is the reference's, NaN or infinite."""
    how = (approximate, "sqrt8", group_size)
    u, dh = torch.full((60, 700), 2.0, device=DEVICE), torch.zeros(60, 700, device=DEVICE)
    dh[0] = 1e4
    (dh if where == "dh" else u)[-1, 650] = value
    codes, group_amax, _ = ops.gelu_encode.reference(u, *how)
    assert not assert_same_largest_gradient(dh, codes, group_amax, how).isfinite()


def test_an_infinite_gradient_does_not_hide_a_nan():
    """Infinity by a derivative of zero, in a later tile than a plain infinity."""
    u, dh = torch.full((60, 700), 2.0, device=DEVICE), torch.ones(60, 700, device=DEVICE)
    u[-1], dh[0, 0], dh[-1, 650] = -30.0, torch.inf, torch.inf
    codes, group_amax, _ = ops.gelu_encode.reference(u, "none", "sqrt8", 128)
    assert ops.gelu_backward_amax.kernel(dh, codes, group_amax, "none", "sqrt8", 128).isnan()


@pytest.mark.parametrize("bad", ["h", "du"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_padding_is_zero_even_where_a_scale_is_not_finite(bad, value):
    codes, group_amax, _ = ops.gelu_encode.reference(awkward(7, 100), "tanh", "sqrt8", 128)
    one, other = torch.ones((), device=DEVICE), torch.full((), value, device=DEVICE)
    scale, top = (other, one) if bad == "h" else (one, other)
    both = (gradient((7, 100)), codes, group_amax, scale, top, "e5m2", True, "tanh", "sqrt8", 128)
    _, data_t, _, _, h_t = ops.gelu_backward_quantize.kernel(*both)
    assert data_t[:, 7:].float().count_nonzero() == 0
    assert h_t[:, 7:].float().count_nonzero() == 0


def test_unknown_forms_are_refused():
    with pytest.raises(ValueError, match="'sigmoid' is not known; choose 'none'"):
        ops.gelu_encode.kernel(torch.zeros(2, 16, device=DEVICE), "sigmoid", "sqrt8", 16)
