"""The kernel that the statistics are compared with, and that the parts add up."""

import pytest
import torch

from overcoat.kernels.norm import rmsnorm_stats


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [4096, 1000])
def test_statistics_alone_are_the_same_statistics(hidden):
    from benchmarks.maximum import EPS, rstd_alone

    x = torch.randn(67, hidden, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(rstd_alone(x), rmsnorm_stats(x, None, EPS)[0], rtol=1e-6, atol=0.0)


@pytest.mark.gpu
def test_two_stages_take_less_than_another_pass_over_the_tensor():
    from benchmarks.maximum import time_maximum

    times = time_maximum(8192, 4096)
    first = times["statistics and row maxima"] - times["statistics alone"]
    assert times["two stages"] == pytest.approx(first + times["maximum of the row maxima"])
    assert 0 < times["maximum of the row maxima"] < times["maximum of the tensor"]
    assert times["two stages"] < times["one stage"]
