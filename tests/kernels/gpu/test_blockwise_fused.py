"""The kernels of kernels/gpu/blockwise_fused.py equal their references."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import blockwise_fused as ops
from tests.kernels.gpu.blockwise_cases import CODES, SWIGLU_SHAPES
from tests.kernels.gpu.compare import NEEDS_GPU, assert_equal
from tests.kernels.gpu.swiglu_cases import gates

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("shape", SWIGLU_SHAPES)
@pytest.mark.parametrize(("code", "group_size"), CODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swiglu_forward(shape, code, group_size, dtype):
    arguments = (gates(shape, dtype), code, group_size)
    assert_equal(ops.swiglu_block_quantize.kernel(*arguments), ops.swiglu_block_quantize.reference(*arguments))
