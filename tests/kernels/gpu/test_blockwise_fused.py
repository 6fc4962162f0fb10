"""The kernels of kernels/gpu/blockwise_fused.py and blockwise_backward.py equal their references.

The norm given its own rstd: a sum over a row is taken in another order than PyTorch's.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import blockwise_fused as ops
from overcoat.kernels.swiglu import swiglu_encode
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.test_blockwise import parameters

pytestmark = NEEDS_GPU

CODES = [("sqrt8", 128), ("e4m3", 16), ("int8", 64)]

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
    *ours, rstd = ops.norm_block_quantize.kernel(x, weight, bias, 1e-5, centered, code, group_size)
    expected = ops.norm_block_quantize.reference(x, weight, bias, 1e-5, centered, code, group_size)
    torch.testing.assert_close(rstd, expected[-1], rtol=2e-6, atol=0)
    mean = torch.zeros_like(rstd) if centered else None
    assert_equal(ours, ops.norm_from_statistics(x, mean, rstd, weight, bias, code, group_size))


@pytest.mark.parametrize("shape", NORM_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_of_a_sum(shape, dtype):
    y, residual = awkward(*shape, dtype), awkward(*shape, dtype, seed=1)
    weight, _ = parameters(shape[1], "weight")
    x, *ours, rstd = ops.add_norm_block_quantize.kernel(y, residual, weight, None, 1e-5, False, "sqrt8", 128)
    assert_equal(x, residual + y)
    assert_equal(ours, ops.norm_from_statistics(x, None, rstd, weight, None, "sqrt8", 128))


def test_norm_passes_nan_on():
    x = torch.randn(3, 300, device=DEVICE)
    x[1, 5] = torch.nan
    _, scale, _, group_amax, rstd = ops.norm_block_quantize.kernel(x, None, None, 1e-5, False, "sqrt8", 128)
    assert rstd.isnan().tolist() == [False, True, False]
    assert scale.isnan().tolist() == [[False, True, False]] * 3
    assert group_amax.isnan().any(1).tolist() == [False, True, False]


# ---- SwiGLU ---------------------------------------------------------------------------------------------------------

SWIGLU_SHAPES = [(1, 128), (130, 256), (61, 688)]
SWIGLU_SHAPES += [] if INTERPRETED else [(1000, 11008), (300, 17920)]


def gates(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return awkward(shape[0], 2 * shape[1], dtype).clamp(-200, 200)


@pytest.mark.parametrize("shape", SWIGLU_SHAPES)
@pytest.mark.parametrize(("code", "group_size"), CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swiglu_forward(shape, code, group_size, dtype):
    arguments = (gates(shape, dtype), code, group_size)
    assert_equal(ops.swiglu_block_quantize.kernel(*arguments), ops.swiglu_block_quantize.reference(*arguments))


@pytest.mark.parametrize("shape", SWIGLU_SHAPES)
@pytest.mark.parametrize(("code", "group_size"), CODES)
@pytest.mark.parametrize("fmt", ["e5m2", "e4m3"])
def test_swiglu_backward(shape, code, group_size, fmt):
    codes, group_amax, _ = swiglu_encode.reference(gates(shape), code, group_size)
    arguments = (torch.randn(shape, device=DEVICE).bfloat16(), codes, group_amax)
    ours = ops.swiglu_block_backward.kernel(*arguments, code, group_size)
    assert_equal(ours, ops.swiglu_block_backward.reference(*arguments, code, group_size))
    ours = ops.swiglu_block_backward_quantize.kernel(*arguments, fmt, code, group_size)
    assert_equal(ours, ops.swiglu_block_backward_quantize.reference(*arguments, fmt, code, group_size))


# ---- rotary embedding -----------------------------------------------------------------------------------------------

# Tokens, positions, query heads, key/value heads, head width.
ROPE_CASES = [(1, 1, 1, 1, 128), (134, 67, 4, 2, 64), (61, 61, 2, 1, 256), (20, 20, 8, 8, 80), (7, 7, 3, 1, 80)]
ROPE_CASES += [] if INTERPRETED else [(2000, 1000, 32, 32, 128), (1000, 1000, 28, 4, 128)]


@pytest.mark.parametrize("case", ROPE_CASES)
@pytest.mark.parametrize("fmt", ["e5m2", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rope_backward(case, fmt, dtype):
    tokens, positions, num_q, num_kv, width = case
    dqkv = awkward(tokens, (num_q + 2 * num_kv) * width, dtype)
    views = dqkv.split((num_q * width, num_kv * width, num_kv * width), 1)
    angle = torch.randn(positions, width, device=DEVICE) * 3  # the halves differ, as the op's contract allows
    tables = (1.3 * angle.cos()).to(dtype), (1.3 * angle.sin()).to(dtype)
    for parts in (views, [part.contiguous() for part in views], [part.t().contiguous().t() for part in views]):
        ours = ops.qk_rope_block_backward.kernel(*parts, *tables, fmt, num_q)
        assert_equal(ours, ops.qk_rope_block_backward.reference(*parts, *tables, fmt, num_q))
