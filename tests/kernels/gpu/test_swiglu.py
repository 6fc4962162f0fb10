"""The kernels of kernels/gpu/swiglu.py equal their references."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import swiglu as ops
from overcoat.kernels.gpu import swiglu as forward
from overcoat.kernels.gpu.common import EXACT
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal
from tests.kernels.gpu.swiglu_cases import GROUPS, MANY_ROWS, SHAPES, gates, just_below

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("code", "group_size"), GROUPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward(shape, code, group_size, dtype):
    x = gates(shape, dtype)
    ours, theirs = ops.swiglu_encode.kernel(x, code, group_size), ops.swiglu_encode.reference(x, code, group_size)
    assert_equal(ours, theirs)
    top = theirs[2]
    assert_equal(ops.swiglu_quantize.kernel(x, top), ops.swiglu_quantize.reference(x, top))


def test_not_finite_reaches_the_output():
    x = gates((4, 256))
    x[1, 3], x[2, 300] = torch.nan, torch.inf
    _, group_amax, top = ops.swiglu_encode.kernel(x, "sqrt8", 128)
    assert not top.isfinite()
    assert not group_amax[1, 0, 0].isfinite()
    assert not group_amax[2, 1, 0].isfinite()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [5, 700 + 5], ids=["gate", "up"])
def test_no_single_bad_value_is_passed_over(value, column):
    """Small, in the last row, behind larger values: the maximum is what the reference says, NaN or infinite."""
    x = torch.full((MANY_ROWS, 1400), 1e-3, device=DEVICE)
    x[0] = 50.0
    x[-1, column] = value
    ours, theirs = ops.swiglu_encode.kernel(x, "sqrt8", 128), ops.swiglu_encode.reference(x, "sqrt8", 128)
    assert not theirs[2].isfinite()
    assert_equal(ours, theirs)


@pytest.mark.parametrize("gate", [-1.2784645, -1e30, -3.0, 0.0, 1e-30, 4.0, 300.0])
def test_the_largest_product_is_found_wherever_it_is(gate):
    """Also where it is barely larger than all others, and where silu comes closest to its bound."""
    for row in (0, MANY_ROWS // 2 - 13, MANY_ROWS - 1):
        x = torch.full((MANY_ROWS, 2 * 700), gate, device=DEVICE)
        x[:, 700:] = 1.0
        x[row, 700 + 69] = 1.0 + 2.0**-22
        assert_equal(ops.swiglu_encode.kernel(x, "sqrt8", 128), ops.swiglu_encode.reference(x, "sqrt8", 128))


@pytest.mark.parametrize("gate", [-30.0, -1.2784645, 0.3, 4.0, 300.0])
def test_a_tile_with_the_largest_product_is_never_passed_over(gate):
    gate_up = torch.full((5, 2 * 700), gate, device=DEVICE)
    gate_up[:, 700:] = 1.0
    codes, group_amax, largest = ops.swiglu_encode.reference(gate_up, "sqrt8", 128)
    top = just_below(largest)
    forward._swiglu_encode_kernel[(2,)](
        gate_up, torch.empty_like(codes), torch.empty_like(group_amax), top, 30, 6, 700, 128, 128, 0, 16,
        num_warps=4, **EXACT,
    )  # fmt: skip
    raised = top.view(torch.float32)
    assert (raised - largest).abs() <= 4e-6 * largest if INTERPRETED else raised == largest
    assert raised > just_below(largest).view(torch.float32)
