"""The norm after a branch: kernel against reference (the reference against FP64: tests/block/test_norm.py)."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels.norm_after import add_norm_encode
from tests.kernels.compare import AWKWARD_SHAPES, DEVICE, assert_equal, awkward


@pytest.mark.kernel
@pytest.mark.parametrize("shape", AWKWARD_SHAPES)
@pytest.mark.parametrize(("affine", "centered"), [("none", False), ("weight", False), ("weight+bias", True)])
@pytest.mark.parametrize(("code", "group_size"), [("sqrt8", 128), ("e4m3", 16), ("int8", 80)])
def test_kernel(shape, affine, centered, code, group_size):
    y, residual = awkward(*shape), awkward(*shape, seed=1)
    weight = None if affine == "none" else torch.randn(shape[1], device=DEVICE).bfloat16()
    bias = torch.randn(shape[1], device=DEVICE).bfloat16() if affine == "weight+bias" else None
    arguments = (y, residual, weight, bias, 1e-5, centered, code, group_size)
    assert_equal(add_norm_encode.kernel(*arguments), add_norm_encode.reference(*arguments), False)


@pytest.mark.kernel
def test_what_is_not_finite_stays_so():
    y, residual = (torch.randn(5, 201, device=DEVICE).bfloat16() for _ in range(2))
    y[1, 3], residual[3, 200] = torch.nan, torch.inf
    total, *_, rstd = add_norm_encode.kernel(y, residual, None, None, 1e-5, False, "sqrt8", 128)
    assert total.isfinite().all(1).tolist() == [True, False, True, False, True]
    assert rstd.isfinite().tolist() == [True, False, True, True, True]
