"""The kernels of kernels/gpu/blockwise_backward.py equal their references."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import blockwise_fused as ops
from overcoat.kernels import rope_blockwise
from overcoat.kernels.swiglu import swiglu_encode
from tests.kernels.gpu.blockwise_cases import CODES, SWIGLU_SHAPES
from tests.kernels.gpu.compare import DEVICE, FORMATS, INTERPRETED, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.swiglu_cases import gates

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("shape", SWIGLU_SHAPES)
@pytest.mark.parametrize(("code", "group_size"), CODES)
def test_swiglu_backward(shape, code, group_size):
    codes, group_amax, _ = swiglu_encode.reference(gates(shape), code, group_size)
    arguments = (torch.randn(shape, device=DEVICE).bfloat16(), codes, group_amax)
    ours = ops.swiglu_block_backward.kernel(*arguments, code, group_size)
    assert_equal(ours, ops.swiglu_block_backward.reference(*arguments, code, group_size))
    for fmt in FORMATS:
        ours = ops.swiglu_block_backward_quantize.kernel(*arguments, fmt, code, group_size)
        assert_equal(ours, ops.swiglu_block_backward_quantize.reference(*arguments, fmt, code, group_size))


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
        ours = rope_blockwise.qk_rope_block_backward.kernel(*parts, *tables, fmt, num_q)
        assert_equal(ours, rope_blockwise.qk_rope_block_backward.reference(*parts, *tables, fmt, num_q))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_padding_is_zero_where_a_scale_is_not_finite(value):
    """134 tokens are padded to 144; the scales of the last block, and of row 133, are those of its bad value."""
    codes, group_amax, _ = swiglu_encode.reference(gates((134, 256)), "sqrt8", 128)
    dh = torch.randn(134, 256, device=DEVICE).bfloat16()
    dh[133, 7] = value
    arguments = (dh, codes, group_amax)
    _, h_t, _ = ops.swiglu_block_backward.kernel(*arguments, "sqrt8", 128)
    _, _, gradient_t, _, again, _ = ops.swiglu_block_backward_quantize.kernel(*arguments, "e5m2", "sqrt8", 128)
    tables = torch.ones(67, 128, device=DEVICE), torch.ones(67, 128, device=DEVICE)
    _, _, rotated_t, scale = rope_blockwise.qk_rope_block_backward.kernel(dh, dh, dh, *tables, "e5m2", 2)
    assert not scale[1].isfinite().all()
    for operand in (h_t, gradient_t, again, rotated_t):
        assert operand.shape[1] == 144
        assert not operand.view(torch.uint8)[:, 134:].any()
        assert operand.view(torch.uint8)[:, :133].any()
