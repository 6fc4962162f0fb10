"""The kernels of kernels/gpu/gelu_blockwise.py equal their references; sums over tokens, added otherwise, nearly."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import gelu_blockwise as block_ops
from tests.kernels.gpu.compare import NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.gelu_cases import OUTPUTS, forms, gradient, shapes

pytestmark = NEEDS_GPU

BLOCK_GROUPS = [("sqrt8", 128), ("e4m3", 16), ("int8", 64)]


@shapes
@pytest.mark.parametrize(("code", "group_size"), BLOCK_GROUPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@forms
def test_block_forward(shape, code, group_size, dtype, approximate):
    arguments = (awkward(*shape, dtype), approximate, code, group_size)
    assert_equal(block_ops.gelu_block_quantize.kernel(*arguments), block_ops.gelu_block_quantize.reference(*arguments))


@shapes
@pytest.mark.parametrize(("code", "group_size"), BLOCK_GROUPS)
@forms
def test_block_backward(shape, code, group_size, approximate):
    kept = block_ops.gelu_block_quantize.reference(awkward(*shape), approximate, code, group_size)[2:]
    arguments, how = (gradient(shape), *kept), (approximate, code, group_size)
    ours = block_ops.gelu_block_backward.kernel(*arguments, *how)
    assert_equal(ours, block_ops.gelu_block_backward.reference(*arguments, *how))
    for fmt, has_bias in OUTPUTS:
        *ours, sums = block_ops.gelu_block_backward_quantize.kernel(*arguments, fmt, has_bias, *how)
        *theirs, expected = block_ops.gelu_block_backward_quantize.reference(*arguments, fmt, has_bias, *how)
        assert_equal(ours, theirs)
        assert_equal(sums, expected, exact=False, steps=8)
