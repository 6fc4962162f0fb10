"""The kernels of kernels/gpu/gelu_backward.py equal their references; sums over tokens, added otherwise, nearly."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import gelu as ops
from overcoat.kernels.gpu import gelu_backward as gpu
from overcoat.kernels.gpu.common import EXACT
from overcoat.kernels.quantize import amax
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.gelu_cases import GROUPS, OUTPUTS, forms, gradient, shapes

pytestmark = NEEDS_GPU


@shapes
@pytest.mark.parametrize(("code", "group_size"), GROUPS)
@forms
def test_backward(shape, code, group_size, approximate):
    codes, group_amax, row_amax = ops.gelu_encode.reference(awkward(*shape), approximate, code, group_size)
    scale = amax.reference(row_amax) / 448
    arguments, how = (gradient(shape), codes, group_amax), (approximate, code, group_size)
    ours = ops.gelu_backward.kernel(*arguments, scale, *how)
    assert_equal(ours, ops.gelu_backward.reference(*arguments, scale, *how))
    top = ops.gelu_backward_amax.reference(*arguments, *how)
    assert_equal(ops.gelu_backward_amax.kernel(*arguments, *how), top)
    for fmt, has_bias in OUTPUTS:
        both = (*arguments, scale, top, fmt, has_bias, *how)
        *ours, sums, h_t = ops.gelu_backward_quantize.kernel(*both)
        *theirs, expected, expected_h = ops.gelu_backward_quantize.reference(*both)
        assert_equal([*ours, h_t], [*theirs, expected_h])
        assert_equal(sums, expected, exact=False, steps=8)


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
        dh, codes, group_amax, top, 30, 6, 700, approximate == "tanh", 128, 128, 2, 16, False, num_warps=1, **EXACT
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


@pytest.mark.parametrize("shape", [(37, 512), (130, 1280)])
@pytest.mark.parametrize("value", [3e4, torch.nan, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_groups_that_lie_in_one_piece(shape, value, dtype, first):
    """BF16 in pairs, either of which may hold the largest; not from an odd element on. The last group counts."""
    how = ("tanh", "sqrt8", 128)
    codes, group_amax, _ = ops.gelu_encode.reference(awkward(*shape), *how)
    dh = torch.zeros(first + shape[0] * shape[1], dtype=dtype, device=DEVICE)[first:].view(shape)
    dh.copy_(gradient(shape))
    for column in (-1, -2):
        dh[-1, -2:] = 1.0
        dh[-1, column] = value
        codes[-1, -2:] = 120
        group_amax[-1, -1] = 2.0
        largest = assert_same_largest_gradient(dh, codes, group_amax, how)
        assert largest > 2e4 if value == 3e4 else not largest.isfinite()


def test_an_infinite_gradient_does_not_hide_a_nan():
    """Infinity by a derivative of zero, in a later tile than a plain infinity."""
    u, dh = torch.full((60, 700), 2.0, device=DEVICE), torch.ones(60, 700, device=DEVICE)
    u[-1], dh[0, 0], dh[-1, 650] = -30.0, torch.inf, torch.inf
    codes, group_amax, _ = ops.gelu_encode.reference(u, "none", "sqrt8", 128)
    assert ops.gelu_backward_amax.kernel(dh, codes, group_amax, "none", "sqrt8", 128).isnan()


@pytest.mark.parametrize("tokens", [16, 48, 80])
@forms
def test_tokens_that_need_no_padding(tokens, approximate):
    """Part of a tile and whole ones: rows that do not exist are stored nowhere."""
    how = (approximate, "sqrt8", 128)
    codes, group_amax, row_amax = ops.gelu_encode.reference(awkward(tokens, 200), *how)
    scale, arguments = amax.reference(row_amax) / 448, (gradient((tokens, 200)), codes, group_amax)
    top = ops.gelu_backward_amax.reference(*arguments, *how)
    ours = ops.gelu_backward.kernel(*arguments, scale, *how)
    assert_equal(ours, ops.gelu_backward.reference(*arguments, scale, *how))
    both = (*arguments, scale, top, "e5m2", False, *how)
    assert_equal(ops.gelu_backward_quantize.kernel(*both), ops.gelu_backward_quantize.reference(*both))


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
