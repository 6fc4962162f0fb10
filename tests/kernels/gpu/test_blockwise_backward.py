"""The kernels of kernels/gpu/blockwise_backward.py equal their references."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import blockwise_fused as ops
from overcoat.kernels.swiglu import swiglu_encode
from tests.kernels.gpu.blockwise_cases import CODES, SWIGLU_SHAPES
from tests.kernels.gpu.compare import DEVICE, FORMATS, NEEDS_GPU, assert_equal
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


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_padding_is_zero_where_a_scale_is_not_finite(value):
    """134 tokens are padded to 144; the scales of the last block, and of row 133, are those of its bad value."""
    codes, group_amax, _ = swiglu_encode.reference(gates((134, 256)), "sqrt8", 128)
    dh = torch.randn(134, 256, device=DEVICE).bfloat16()
    dh[133, 7] = value
    arguments = (dh, codes, group_amax)
    _, h_t, _ = ops.swiglu_block_backward.kernel(*arguments, "sqrt8", 128)
    _, _, gradient_t, _, again, _ = ops.swiglu_block_backward_quantize.kernel(*arguments, "e5m2", "sqrt8", 128)
    for operand in (h_t, gradient_t, again):
        assert operand.shape[1] == 144
        assert not operand.view(torch.uint8)[:, 134:].any()
        assert operand.view(torch.uint8)[:, :133].any()
