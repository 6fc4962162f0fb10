"""The kernels of kernels/gpu/quantize.py equal their references (see compare.py for how)."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import quantize as ops
from tests.kernels.gpu.compare import DEVICE, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.quantize_cases import DTYPES, SHAPES

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("shape", [(), (1,), (7, 100), (300, 1000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(shape, dtype):
    x = torch.randn(shape, device=DEVICE).to(dtype)
    assert_equal(ops.amax.kernel(x), ops.amax.reference(x))


@pytest.mark.parametrize("size", [100, 200_000])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_amax_not_finite(size, value):
    x = torch.randn(size, device=DEVICE)
    x[size // 3], x[size // 2] = value, torch.inf
    assert_equal(ops.amax.kernel(x), ops.amax.reference(x))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(shape, fmt, dtype):
    x = awkward(*shape, dtype)
    amax = ops.amax.reference(x)
    assert_equal(ops.quantize.kernel(x, amax, fmt), ops.quantize.reference(x, amax, fmt))
    assert_equal(ops.quantize_both.kernel(x, amax, fmt), ops.quantize_both.reference(x, amax, fmt))
    assert_equal(ops.quantize_t.kernel(x, amax, fmt), ops.quantize_t.reference(x, amax, fmt))


@pytest.mark.parametrize("amax", [0.0, 1e-38, 1e-44, torch.inf, torch.nan, 2.5])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_quantize_extreme_scales(amax, fmt):
    """Scales at the ends of the range, and values that saturate; padding stays zero even so."""
    x = torch.tensor([[0.0, 1e-38, -3.0, 1e30, torch.inf, -torch.inf, torch.nan]], device=DEVICE)
    amax = torch.tensor(amax, device=DEVICE)
    assert_equal(ops.quantize_both.kernel(x, amax, fmt), ops.quantize_both.reference(x, amax, fmt))
