"""The kernels of kernels/gpu/blockwise_fused.py equal their references.

The norm given its own rstd: a sum over a row is taken in another order than PyTorch's.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import blockwise_fused as ops
from overcoat.kernels import norm_blockwise
from tests.kernels.gpu.blockwise_cases import CODES, SWIGLU_SHAPES, parameters
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.swiglu_cases import gates

pytestmark = NEEDS_GPU


# ---- norm -----------------------------------------------------------------------------------------------------------

NORM_SHAPES = [(1, 16), (7, 100), (61, 688), (9, 1024)]
NORM_SHAPES += [] if INTERPRETED else [(1000, 4096), (300, 6656), (40, 16384)]


def balanced(rows: int, columns: int) -> torch.Tensor:
    """Rows of +-2 and +-1/2 that sum to exactly 0, in whatever order."""
    generator = torch.Generator().manual_seed(rows + columns)
    half = 2.0 * 4.0 ** -torch.randint(0, 2, (rows, columns // 2), generator=generator)
    row = torch.cat((half, -half, torch.zeros(rows, columns % 2)), 1)
    return row[:, torch.randperm(columns, generator=generator)].to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("shape", NORM_SHAPES)
@pytest.mark.parametrize("affine", ["none", "weight", "both"])
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(("code", "group_size"), CODES)
def test_norm(shape, affine, centered, code, group_size):
    x = balanced(*shape) if centered else awkward(*shape)
    weight, bias = parameters(shape[1], affine)
    *ours, rstd = norm_blockwise.norm_block_quantize.kernel(x, weight, bias, 1e-5, centered, code, group_size)
    expected = norm_blockwise.norm_block_quantize.reference(x, weight, bias, 1e-5, centered, code, group_size)
    torch.testing.assert_close(rstd, expected[-1], rtol=2e-6, atol=0)
    mean = torch.zeros_like(rstd) if centered else None
    assert_equal(ours, norm_blockwise.norm_from_statistics(x, mean, rstd, weight, bias, code, group_size))


@pytest.mark.parametrize("shape", NORM_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_of_a_sum(shape, dtype):
    y, residual = awkward(*shape, dtype), awkward(*shape, dtype, seed=1)
    weight, _ = parameters(shape[1], "weight")
    x, *ours, rstd = norm_blockwise.add_norm_block_quantize.kernel(y, residual, weight, None, 1e-5, False, "sqrt8", 128)
    assert_equal(x, residual + y)
    assert_equal(ours, norm_blockwise.norm_from_statistics(x, None, rstd, weight, None, "sqrt8", 128))


def test_norm_passes_nan_on():
    x = torch.randn(3, 300, device=DEVICE)
    x[1, 5] = torch.nan
    _, scale, _, group_amax, rstd = norm_blockwise.norm_block_quantize.kernel(x, None, None, 1e-5, False, "sqrt8", 128)
    assert rstd.isnan().tolist() == [False, True, False]
    assert scale.isnan().tolist() == [[False, True, False]] * 3
    assert group_amax.isnan().any(1).tolist() == [False, True, False]


# ---- SwiGLU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SWIGLU_SHAPES)
@pytest.mark.parametrize(("code", "group_size"), CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swiglu_forward(shape, code, group_size, dtype):
    arguments = (gates(shape, dtype), code, group_size)
    assert_equal(ops.swiglu_block_quantize.kernel(*arguments), ops.swiglu_block_quantize.reference(*arguments))
