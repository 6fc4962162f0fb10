"""The kernels of kernels/gpu/norm.py against their references.

Sums over a row are taken in another order than PyTorch's: statistics and dx agree to rounding, dx then within one BF16
step. Given the same statistics, `norm_quantize` is bit for bit the reference.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import norm as ops
from overcoat.kernels import norm_backward
from overcoat.kernels.quantize import amax
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward

pytestmark = NEEDS_GPU

SHAPES = [(1, 16), (7, 100), (61, 688), (9, 5120)]
SHAPES += [] if INTERPRETED else [(1000, 4096), (300, 6656)]


def parameters(width: int, affine: str):
    weight = None if affine == "none" else torch.randn(width, device=DEVICE).bfloat16()
    if weight is not None:
        weight[0], weight[1] = 0.0, 1e-4
    return weight, torch.randn(width, device=DEVICE).bfloat16() if affine == "both" else None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", ["none", "weight", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stats(shape, affine, dtype):
    x, (weight, bias) = awkward(*shape, dtype), parameters(shape[1], affine)
    assert_equal(ops.rmsnorm_stats.kernel(x, weight, 1e-5), ops.rmsnorm_stats.reference(x, weight, 1e-5), False)
    ours = ops.layernorm_stats.kernel(x, weight, bias, 1e-5)
    assert_equal(ours, ops.layernorm_stats.reference(x, weight, bias, 1e-5), False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", ["none", "weight", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_add_stats(shape, affine, dtype):
    y, residual, (weight, bias) = awkward(*shape, dtype), awkward(*shape, dtype, seed=1), parameters(shape[1], affine)
    x, *ours = ops.add_rmsnorm_stats.kernel(y, residual, weight, 1e-5)
    assert_equal(x, residual + y)
    assert_equal(ours, ops.rmsnorm_stats.reference(x, weight, 1e-5), False)
    x, *ours = ops.add_layernorm_stats.kernel(y, residual, weight, bias, 1e-5)
    assert_equal(x, residual + y)
    assert_equal(ours, ops.layernorm_stats.reference(x, weight, bias, 1e-5), False)


def test_stats_pass_nan_on():
    x = torch.randn(3, 100, device=DEVICE)
    x[1, 5] = torch.nan
    _, row_amax = ops.rmsnorm_stats.kernel(x, None, 1e-5)
    assert row_amax.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", ["none", "weight", "both"])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("code", "group_size"), [("sqrt8", 128), ("e4m3", 16)])
def test_norm_quantize(shape, affine, centered, code, group_size):
    x, (weight, bias) = awkward(*shape), parameters(shape[1], affine)
    mean, rstd, row_amax = ops.layernorm_stats.reference(x, weight, bias, 1e-5)
    arguments = (x, mean if centered else None, rstd, weight, bias, amax.reference(row_amax), code, group_size)
    assert_equal(ops.norm_quantize.kernel(*arguments), ops.norm_quantize.reference(*arguments))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("code", "group_size"), [("sqrt8", 128), ("e4m3", 16)])
def test_norm_backward(shape, centered, with_residual, has_bias, code, group_size):
    x, (weight, _) = awkward(*shape), parameters(shape[1], "weight")
    dy = torch.randn(shape, device=DEVICE).bfloat16()
    dresidual = torch.randn(shape, device=DEVICE).bfloat16() if with_residual else None
    mean, rstd, row_amax = ops.layernorm_stats.reference(x, weight, None, 1e-5)
    _, _, codes, group_amax = ops.norm_quantize.reference(
        x, mean, rstd, weight, None, amax.reference(row_amax), code, group_size
    )
    arguments = (dy, codes, group_amax, rstd, weight, dresidual, centered, has_bias, code, group_size)
    ours, theirs = norm_backward.norm_backward.kernel(*arguments), norm_backward.norm_backward.reference(*arguments)
    assert_equal(ours[0], theirs[0], False)
    for a, b in zip(ours[1:3], theirs[1:3]):
        rounding = 2**-7 if a.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(a, b, rtol=1e-4 + rounding, atol=1e-4 * shape[0] ** 0.5)
    assert ours[3] == ours[0].abs().amax()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("group_size", [16, 80, 128])
def test_a_maximum_that_is_not_finite_is_told(value, group_size):
    """From the last column, of a width that fills no group: what the next quantization takes for max |dx|."""
    x = torch.randn(5, 201, device=DEVICE).bfloat16()
    rstd, row_amax = ops.rmsnorm_stats.reference(x, None, 1e-5)
    arguments = (x, None, rstd, None, None, amax.reference(row_amax), "sqrt8", group_size)
    _, _, codes, group_amax = ops.norm_quantize.reference(*arguments)
    dresidual = torch.zeros_like(x)
    dresidual[3, 200] = value
    backward = (torch.randn_like(x), codes, group_amax, rstd, None, dresidual, False, False, "sqrt8", group_size)
    assert not norm_backward.norm_backward.kernel(*backward)[3].isfinite()


@pytest.mark.skipif(INTERPRETED, reason="one program after another: nothing to race")
def test_parameter_gradients_are_deterministic():
    dy, x = (torch.randn(4096, 4096, device=DEVICE).bfloat16() for _ in range(2))
    rstd, row_amax = ops.rmsnorm_stats(x, None, 1e-5)
    _, _, codes, group_amax = ops.norm_quantize(x, None, rstd, None, None, amax(row_amax), "sqrt8", 128)
    runs = [
        norm_backward.norm_backward(dy, codes, group_amax, rstd, None, None, False, True, "sqrt8", 128)
        for _ in range(3)
    ]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))
