"""The kernel of kernels/partials.py: sums of whole numbers, which are exact in any order, and maxima."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import partials
from tests.kernels.compare import DEVICE, INTERPRETED, NEEDS_GPU

pytestmark = NEEDS_GPU

# One row, ragged columns, rows of several tiles and no multiple of one.
SHAPES = [(1, 1), (3, 100), (64, 688), (528, 128), (1100, 20)]
SHAPES += [] if INTERPRETED else [(264, 4096), (1056, 4096), (256, 11008)]


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-1000, 1000, shape, device=DEVICE).float()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2])
def test_sums_and_the_largest_of_the_programs_maxima(shape, count):
    """In FP32, and written to other types; a column with NaN is told."""
    buffers, tops = [whole_numbers(*shape) for _ in range(count)], torch.rand(shape[0], device=DEVICE)
    buffers[-1][-1, 0] = torch.nan
    expected = [buffer.sum(0) for buffer in buffers]
    sums = [torch.empty(shape[1], dtype=dtype, device=DEVICE) for dtype in (torch.bfloat16, torch.float32)][:count]
    amax = torch.empty((), device=DEVICE)
    partials.sum_partials_into(buffers, sums, tops, amax)
    for ours, plain, truth in zip(sums, partials.sum_partials(*buffers), expected, strict=True):
        torch.testing.assert_close(plain, truth, rtol=0, atol=0, equal_nan=True)
        tolerance = 2**-7 if INTERPRETED else 0
        torch.testing.assert_close(ours, truth.to(ours.dtype), rtol=tolerance, atol=0, equal_nan=True)
    assert amax == tops.amax()
    tops[shape[0] // 2] = torch.nan
    partials.sum_partials_into(buffers, sums, tops, amax)
    assert amax.isnan()


@pytest.mark.skipif(INTERPRETED, reason="one program after another: nothing to race")
def test_the_same_sums_every_time():
    buffer = torch.randn(1056, 4096, device=DEVICE)
    (first,) = partials.sum_partials(buffer)
    torch.testing.assert_close(first, buffer.double().sum(0).float(), rtol=1e-4, atol=1e-3)
    assert all(torch.equal(partials.sum_partials(buffer)[0], first) for _ in range(3))
