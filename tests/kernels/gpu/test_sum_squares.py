"""The kernels of kernels/gpu/sum_squares.py on a GPU; under the interpreter: test_adamw_interpreted.py."""

import pytest
import torch

from overcoat.kernels.adamw import gradients_sum_squares
from overcoat.kernels.gpu import sum_squares

pytestmark = pytest.mark.gpu


def test_sum_of_squares():
    grads = [torch.randn(s, device="cuda", dtype=d) for s in (3, 100_003, 0) for d in (torch.bfloat16, torch.float32)]
    expected = sum(g.double().square().sum() for g in grads)
    torch.testing.assert_close(gradients_sum_squares(grads).double(), expected, rtol=1e-5, atol=0)
    large = [torch.full_like(g, 1e18) for g in grads]
    expected = sum(g.double().square().sum() for g in large)  # 4e41, which FP32 does not hold
    torch.testing.assert_close(gradients_sum_squares(large), expected, rtol=1e-5, atol=0)
    grads[2][70_001] = float("inf")
    assert not gradients_sum_squares(grads).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_squares_of_each_tensor(dtype):
    """One tensor, many programs, more partial sums than a program reads at once; which sums are not finite."""
    sizes = (3, 100_003, 0, 1, 80_000_001, 65_536)
    grads = [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]
    gradients = sum_squares.Gradients(list(sizes), torch.device("cuda"))
    gradients.set(grads)
    first = gradients.sums_of_squares()
    expected = torch.stack([g.double().square().sum() for g in grads])
    torch.testing.assert_close(first.squares.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients.sum_squares().double(), expected.sum(), rtol=1e-5, atol=0)
    assert not first.skips.any()
    grads[4][70_001_000], grads[0][1] = torch.nan, -torch.inf
    second = gradients.sums_of_squares(first)
    assert second.skips.tolist() == [True, False, False, False, True, False]
    assert second.squares is first.squares
