"""`overcoat.kernels.multi_tensor`: sums of squares, and which gradients are copied before a kernel reads them."""

import math

import pytest
import torch

from overcoat.kernels.multi_tensor import Gradients, sum_squares
from tests.kernels.compare import DEVICE, INTERPRETED


@pytest.mark.gpu
def test_addresses_uploaded_in_a_capture_are_there_at_a_replay_only():
    """A second graph over the same gradients must upload them again."""
    first, second = torch.ones(1000, device="cuda"), torch.full((1000,), 2.0, device="cuda")
    gradients = Gradients([1000], first.device)
    gradients.set([first])
    assert gradients.sum_squares().item() == 1000
    sums, graphs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gradients.set([second])
            sums.append(gradients.sum_squares())
        graphs.append(graph)
    graphs[1].replay()
    assert sums[1].item() == 4000
    gradients.set([second])
    assert gradients.sum_squares().item() == 4000


# ---- sums of squares --------------------------------------------------------------------------------------------


def test_sums_beyond_fp32_are_finite_and_squares_beyond_it_are_not():
    """Each of 2^126 fits, four of them, 2^128, do not."""
    large = torch.full((4,), 2.0**63)
    assert sum_squares([large]) == 2.0**128
    assert sum_squares([large, torch.tensor([-(2.0**64)])]) == math.inf
    assert sum_squares([large.double().bfloat16()]) == 2.0**128


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sum_shows_every_element_that_is_not_finite(bad):
    for place in (0, 299):
        grad = torch.ones(300)
        grad[place] = bad
        assert not sum_squares([torch.ones(7), grad]).isfinite()


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_squares_of_each_tensor(dtype):
    """One tensor, many programs, on a GPU many partial sums; which are not finite."""
    sizes = (3, 100_003, 0, 1, 200_001 if INTERPRETED else 80_000_001, 65_536)
    grads = [torch.randn(size, device=DEVICE, dtype=dtype) for size in sizes]
    gradients = Gradients(list(sizes), DEVICE)
    gradients.set(grads)
    first, flags = gradients.sums_of_squares()
    expected = torch.stack([g.double().square().sum() for g in grads])
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients.sum_squares(), expected.sum(), rtol=1e-5, atol=0)
    assert first.isfinite().all()
    assert not flags.any()
    grads[4][-1000], grads[0][1] = torch.nan, -torch.inf
    second, flags = gradients.sums_of_squares()
    assert second.isfinite().tolist() == [False, True, True, True, False, True]
    assert torch.equal(flags, ~second.isfinite())
    large = [torch.full_like(g, 1e18) for g in grads]  # 1e41 in all, which FP32 does not hold
    gradients.set(large)
    expected = sum(g.double().square().sum() for g in large)
    torch.testing.assert_close(gradients.sum_squares(), expected, rtol=1e-5, atol=0)
    assert gradients.sums_of_squares()[0].isfinite().all()
