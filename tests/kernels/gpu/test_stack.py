"""The kernels of kernels/gpu/stack.py equal their references."""

from __future__ import annotations

import pytest

from overcoat.kernels import stack
from tests.kernels.gpu.compare import NEEDS_GPU, assert_equal, awkward

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [336, 1040, 77])
@pytest.mark.parametrize("sizes", [[16], [48, 16, 16], [100, 61], [130, 2, 4, 64, 18]])
def test_stack_weights(sizes, columns, transposed):
    weights = [awkward(rows, columns, seed=i) for i, rows in enumerate(sizes)]
    amax = stack.stack_amax.kernel(weights)
    assert_equal(amax, stack.stack_amax.reference(weights))
    ours = stack.stack_weights.kernel(weights, amax, transposed)
    assert_equal(ours, stack.stack_weights.reference(weights, amax, transposed))
