"""The kernels of kernels/gpu/gelu.py equal their references."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import gelu as ops
from overcoat.kernels.quantize import amax
from tests.kernels.gpu.compare import DEVICE, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.gelu_cases import GROUPS, forms, shapes

pytestmark = NEEDS_GPU


@shapes
@pytest.mark.parametrize(("code", "group_size"), GROUPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@forms
def test_forward(shape, code, group_size, dtype, approximate):
    u = awkward(*shape, dtype)
    theirs = ops.gelu_encode.reference(u, approximate, code, group_size)
    assert_equal(ops.gelu_encode.kernel(u, approximate, code, group_size), theirs)
    top = amax.reference(theirs[2])
    assert_equal(ops.gelu_quantize.kernel(u, top, approximate), ops.gelu_quantize.reference(u, top, approximate))


@forms
def test_quantize_takes_no_notice_of_rows(approximate):
    """Tensors of a few programs and a bit, and strided ones."""
    wide = awkward(9, 1000)
    for u in (wide, wide[:, :333], wide.t()):
        top = u.abs().amax().float()
        assert_equal(ops.gelu_quantize.kernel(u, top, approximate), ops.gelu_quantize.reference(u, top, approximate))


@forms
def test_extremes_and_what_is_not_finite(approximate):
    """Squares and cubes that overflow give no NaN; NaN and infinities reach the row's and the group's maximum."""
    u = torch.zeros(4, 256, device=DEVICE)
    u[0, :4] = torch.tensor([3e38, -3e38, 2e19, -2e19])
    u[1, 3], u[2, 200], u[3, 200] = torch.nan, torch.inf, 1.0
    _, group_amax, row_amax = ops.gelu_encode.kernel(u, approximate, "sqrt8", 128)
    assert row_amax.isfinite().tolist() == [True, False, False, True]
    assert row_amax[0].item() == u[0, 0].item()
    assert group_amax.isfinite().tolist() == [[True, True], [False, True], [True, False], [True, True]]
    codes, group_amax, row_amax = ops.gelu_encode.kernel(u[:1], approximate, "sqrt8", 128)
    dh, scale = torch.ones_like(u[:1]), row_amax[0] / 448
    du, _ = ops.gelu_backward.kernel(dh, codes, group_amax, scale, approximate, "sqrt8", 128)
    torch.testing.assert_close(du[0, :2].cpu(), torch.tensor([1.0, 0.0]), rtol=0, atol=1e-6)


def test_unknown_forms_are_refused():
    with pytest.raises(ValueError, match="'sigmoid' is not known; choose 'none'"):
        ops.gelu_encode.kernel(torch.zeros(2, 16, device=DEVICE), "sigmoid", "sqrt8", 16)
