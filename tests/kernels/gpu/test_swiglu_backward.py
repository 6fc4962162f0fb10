"""The kernels of kernels/gpu/swiglu_backward.py equal their references."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import swiglu as ops
from overcoat.kernels.gpu import swiglu_backward as gpu
from overcoat.kernels.gpu.common import EXACT
from tests.kernels.gpu.compare import DEVICE, FORMATS, INTERPRETED, NEEDS_GPU, assert_equal
from tests.kernels.gpu.swiglu_cases import GROUPS, MANY_ROWS, SHAPES, gates, just_below

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("code", "group_size"), GROUPS)
def test_backward(shape, code, group_size):
    codes, group_amax, top = ops.swiglu_encode.reference(gates(shape), code, group_size)
    dh = torch.randn(shape, device=DEVICE).bfloat16()
    scale = top / 448
    arguments = (dh, codes, group_amax)
    ours = ops.swiglu_backward.kernel(*arguments, scale, code, group_size)
    assert_equal(ours, ops.swiglu_backward.reference(*arguments, scale, code, group_size))
    largest = ops.swiglu_backward_amax.reference(*arguments, code, group_size)
    assert_equal(ops.swiglu_backward_amax.kernel(*arguments, code, group_size), largest)
    for fmt in FORMATS:
        ours = ops.swiglu_backward_quantize.kernel(*arguments, scale, largest, fmt, code, group_size)
        assert_equal(ours, ops.swiglu_backward_quantize.reference(*arguments, scale, largest, fmt, code, group_size))


def assert_same_largest_gradient(dh: torch.Tensor, codes: torch.Tensor, group_amax: torch.Tensor) -> torch.Tensor:
    arguments = (dh, codes, group_amax, "sqrt8", 128)
    largest = ops.swiglu_backward_amax.reference(*arguments)
    assert_equal(ops.swiglu_backward_amax.kernel(*arguments), largest)
    return largest


@pytest.mark.parametrize("gate", [-30.0, -2.3994, -1.2784645, -0.01, 0.0, 0.3, 1.5, 2.3994, 2.5, 40.0])
@pytest.mark.parametrize("up", [1.0, 0.0, -3.0])
def test_a_tile_with_the_largest_gradient_is_never_passed_over(gate, up):
    """Also where another program has found one barely smaller, at gates where the bounds are closest to be reached."""
    gate_up = torch.full((5, 2 * 700), gate, device=DEVICE)
    gate_up[:, 700:] = up
    codes, group_amax, _ = ops.swiglu_encode.reference(gate_up, "sqrt8", 128)
    dh = torch.ones(5, 700, device=DEVICE)
    largest = assert_same_largest_gradient(dh, codes, group_amax)
    top = just_below(largest)
    gpu._swiglu_gradient_amax_kernel[(2,)](
        dh, codes, group_amax, top, 30, 6, 700, 128, 128, 0, 16, 4, False, num_warps=1, **EXACT
    )
    raised = top.view(torch.float32)
    assert (raised - largest).abs() <= 4e-6 * largest if INTERPRETED else raised == largest
    assert raised > just_below(largest).view(torch.float32) or largest == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["dh", "gate", "up"])
def test_no_bad_value_is_passed_over_for_the_gradient(value, where):
    """In the last row, behind larger values; infinities may cancel into NaN, as in the reference."""
    gate_up = torch.full((MANY_ROWS, 1400), 1e-3, device=DEVICE)
    gate_up[0] = 50.0
    dh = torch.ones(MANY_ROWS, 700, device=DEVICE)
    if where == "dh":
        dh[-1, 5] = value
    else:
        gate_up[-1, 5 if where == "gate" else 705] = value
    codes, group_amax, _ = ops.swiglu_encode.reference(gate_up, "sqrt8", 128)
    assert not assert_same_largest_gradient(dh, codes, group_amax).isfinite()


@pytest.mark.parametrize("rows", [(0, 100), (100, 0), (0, 8), (8, 0)], ids=str)
def test_a_gradient_that_overflows_on_the_way_is_not_passed_over(rows):
    """For a finite one near FP32's end, in another tile or in another part of the same."""
    finite, infinite = rows
    gate_up, dh = torch.zeros(128, 2 * 128, device=DEVICE), torch.zeros(128, 128, device=DEVICE)
    gate_up[finite, 0], gate_up[finite, 128], dh[finite, 0] = 1.28, 1.0, 2e38
    gate_up[infinite, 128], dh[infinite, 0] = 1.4 * 2.0**28, 1e30
    codes, group_amax, _ = ops.swiglu_encode.reference(gate_up, "sqrt8", 128)
    assert assert_same_largest_gradient(dh, codes, group_amax).isinf()


@pytest.mark.parametrize("shape", [(37, 512), (130, 1280)])
@pytest.mark.parametrize("value", [3e4, torch.nan, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_groups_that_lie_in_one_piece(shape, value, dtype, first):
    """BF16 in pairs, either of which may hold the largest; not from an odd element on. The last group counts."""
    codes, group_amax, _ = ops.swiglu_encode.reference(gates(shape), "sqrt8", 128)
    codes[-1, -2:], codes[-1, shape[1] - 2 : shape[1]], group_amax[-1, :, -1] = 120, 120, 2.0
    dh = torch.zeros(first + shape[0] * shape[1], dtype=dtype, device=DEVICE)[first:].view(shape)
    dh.copy_(torch.randn(shape, device=DEVICE))
    for column in (-1, -2):
        dh[-1, -2:] = 1.0
        dh[-1, column] = value
        largest = assert_same_largest_gradient(dh, codes, group_amax)
        assert largest > 2e4 if value == 3e4 else not largest.isfinite()


def test_gradients_far_apart_in_size():
    """Rows from 1e-30 to 1e30: most tiles are passed over, none that matters."""
    gate_up = torch.randn(200, 2 * 300, device=DEVICE)
    codes, group_amax, _ = ops.swiglu_encode.reference(gate_up, "sqrt8", 128)
    sizes = torch.logspace(-30, 30, 200, device=DEVICE)[torch.randperm(200, device=DEVICE)]
    assert_same_largest_gradient(torch.randn(200, 300, device=DEVICE) * sizes[:, None], codes, group_amax)
