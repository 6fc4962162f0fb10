"""The kernels of kernels/gpu/swiglu.py equal their references."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import swiglu as ops
from overcoat.kernels.quantize import amax
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward

pytestmark = NEEDS_GPU

SHAPES = [(1, 16), (7, 100), (61, 688)]
SHAPES += [] if INTERPRETED else [(1000, 11008), (300, 17920)]
GROUPS = [("sqrt8", 128), ("e4m3", 16), ("int8", 80)]


def gates(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return awkward(shape[0], 2 * shape[1], dtype).clamp(-200, 200)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("code", "group_size"), GROUPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward(shape, code, group_size, dtype):
    x = gates(shape, dtype)
    ours, theirs = ops.swiglu_encode.kernel(x, code, group_size), ops.swiglu_encode.reference(x, code, group_size)
    assert_equal(ours, theirs)
    top = amax.reference(theirs[2])
    assert_equal(ops.swiglu_quantize.kernel(x, top), ops.swiglu_quantize.reference(x, top))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("code", "group_size"), GROUPS)
@pytest.mark.parametrize("fmt", ["e5m2", "e4m3"])
def test_backward(shape, code, group_size, fmt):
    codes, group_amax, row_amax = ops.swiglu_encode.reference(gates(shape), code, group_size)
    dh = torch.randn(shape, device=DEVICE).bfloat16()
    scale = amax.reference(row_amax) / 448
    arguments = (dh, codes, group_amax)
    ours = ops.swiglu_backward.kernel(*arguments, scale, code, group_size)
    assert_equal(ours, ops.swiglu_backward.reference(*arguments, scale, code, group_size))
    first = ops.swiglu_backward_amax.reference(*arguments, scale, code, group_size)
    assert_equal(ops.swiglu_backward_amax.kernel(*arguments, scale, code, group_size), first)
    ours = ops.swiglu_backward_quantize.kernel(*arguments, first[0], fmt, code, group_size)
    assert_equal(ours, ops.swiglu_backward_quantize.reference(*arguments, first[0], fmt, code, group_size))


def test_not_finite_reaches_the_output():
    x = gates((4, 256))
    x[1, 3], x[2, 300] = torch.nan, torch.inf
    _, group_amax, row_amax = ops.swiglu_encode.kernel(x, "sqrt8", 128)
    assert row_amax.isfinite().tolist() == [True, False, False, True]
    assert not group_amax[1, 0, 0].isfinite()
    assert not group_amax[2, 1, 0].isfinite()
