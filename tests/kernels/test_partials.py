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
def test_sums(shape, count):
    buffers = [whole_numbers(*shape) for _ in range(count)]
    sums = partials.sum_partials(*buffers)
    assert len(sums) == count
    assert all(torch.equal(ours, buffer.sum(0)) for ours, buffer in zip(sums, buffers))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2])
def test_sums_of_other_types_and_the_largest_of_the_programs_maxima(shape, count):
    buffers, tops = [whole_numbers(*shape) for _ in range(count)], torch.rand(shape[0], device=DEVICE)
    sums = [torch.empty(shape[1], dtype=dtype, device=DEVICE) for dtype in (torch.bfloat16, torch.float32)][:count]
    amax = torch.empty((), device=DEVICE)
    partials.sum_partials_into(buffers, sums, tops, amax)
    for ours, buffer in zip(sums, buffers):
        torch.testing.assert_close(ours, buffer.sum(0).to(ours.dtype), rtol=2**-7 if INTERPRETED else 0, atol=0)
    assert amax == tops.amax()
    tops[shape[0] // 2] = torch.nan
    partials.sum_partials_into(buffers, sums, tops, amax)
    assert amax.isnan()


def test_a_column_with_nan_or_infinity_is_told():
    buffer = whole_numbers(600, 40)
    buffer[599, 3], buffer[0, 39] = torch.nan, torch.inf
    (total,) = partials.sum_partials(buffer)
    assert total[3].isnan()
    assert total[39].isinf()
    assert total.isfinite().sum() == 38


@pytest.mark.skipif(INTERPRETED, reason="one program after another: nothing to race")
def test_the_same_sums_every_time():
    buffer = torch.randn(1056, 4096, device=DEVICE)
    (first,) = partials.sum_partials(buffer)
    torch.testing.assert_close(first, buffer.double().sum(0).float(), rtol=1e-4, atol=1e-3)
    assert all(torch.equal(partials.sum_partials(buffer)[0], first) for _ in range(3))
