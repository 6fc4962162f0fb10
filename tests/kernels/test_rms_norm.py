"""RMSNorm in the model's own dtype against FP64."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels.norm import rms_norm, rms_norm_backward
from tests import exact
from tests.emulation import sqnr
from tests.kernels.samples import normal

EPS = 1e-5
# Rounded once to BF16, errors spread evenly over a unit in the last place: 53 dB and a little.
BF16_DB = 50
shapes = pytest.mark.parametrize("shape", [(1, 16), (7, 200), (130, 4096), (33, 6656)])


def data(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """dy, x and a weight that spans 0, 1e-4, 1 and 10 with both signs."""
    weight = normal(shape[1], seed=5).sign() * torch.tensor([0.0, 1e-4, 1.0, 10.0]).repeat(shape[1] // 4)
    return tuple(t.to(device, dtype) for t in (normal(*shape, seed=1), 3 * normal(*shape), weight))


@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    dy, x, weight = data(shape, dtype, device)
    wide_x, wide_weight = (t.double().requires_grad_() for t in (x, weight))
    truth = exact.norm(wide_x, wide_weight, None, EPS, False)
    truth.backward(dy.double())
    y, rstd = rms_norm(x, weight, EPS)
    dx, dweight = rms_norm_backward(dy, x, rstd, weight)
    assert (y.dtype, rstd.dtype, dx.dtype, dweight.dtype) == (dtype, torch.float32, dtype, dtype)
    assert rstd.shape == shape[:1]
    limit = BF16_DB if dtype == torch.bfloat16 else 110
    assert sqnr(truth, y) > limit
    assert sqnr(wide_x.grad, dx) > limit
    assert sqnr(wide_weight.grad, dweight) > limit
