"""Norms straight to FP8 blocks against FP64 and their parts, and the kernel given its own rstd, bit for bit."""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import Quantized, decode_groups
from overcoat.kernels.norm import norm_quantize
from overcoat.kernels.norm_blockwise import add_norm_block_quantize, norm_block_quantize, norm_from_statistics
from tests import exact
from tests.exact import E4M3_DB, KEPT_DB, assert_close, assert_close_float32
from tests.kernels.compare import DEVICE, INTERPRETED, assert_equal, awkward
from tests.kernels.samples import normal
from tests.kernels.test_blockwise import decoded

tokens_ = pytest.mark.parametrize("tokens", [1, 7, 150])
EPS = 1e-5


@tokens_
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("affine", ["none", "weight", "weight+bias"])
@pytest.mark.parametrize("added", [False, True], ids=["", "sum"])
def test_norm(tokens, centered, affine, added, device):
    x = (3 * normal(tokens, 200) + 1).to(device, torch.bfloat16)
    weight = (1 + 0.3 * normal(200, seed=5)).to(device) if "weight" in affine else None
    bias = normal(200, seed=6).to(device) if "bias" in affine and centered else None
    if added:
        y, residual = normal(tokens, 200, seed=7).to(device, torch.bfloat16), x
        x, *results = add_norm_block_quantize(y, residual, weight, bias, EPS, centered, "sqrt8", 64)
        assert torch.equal(x, y + residual)
    else:
        results = norm_block_quantize(x, weight, bias, EPS, centered, "sqrt8", 64)
    y8, scale, codes, group_amax, rstd = results
    truth = exact.norm(x.double(), *(p if p is None else p.double() for p in (weight, bias)), EPS, centered)
    assert_close("y", truth, decoded(y8, scale), E4M3_DB)
    xhat = exact.norm(x.double(), None, None, EPS, centered)
    assert_close("xhat", xhat, decode_groups(Quantized(codes, group_amax), "sqrt8", 64), KEPT_DB["sqrt8"])
    wide = x.double() - (x.double().mean(1, keepdim=True) if centered else 0)
    assert_close_float32("rstd", (wide.square().mean(1) + EPS).rsqrt(), rstd, 200)


@tokens_
def test_it_keeps_the_codes_of_the_other_norm(tokens, device):
    x, weight = normal(tokens, 200).to(device), normal(200, seed=1).to(device)
    _, _, codes, group_amax, rstd = norm_block_quantize(x, weight, None, EPS, False, "int8", 128)
    *_, expected, expected_amax = norm_quantize(x, None, rstd, weight, None, torch.ones_like(rstd[0]), "int8", 128)
    assert torch.equal(codes, expected)
    assert torch.equal(group_amax, expected_amax)


# ---- kernels -----------------------------------------------------------------------------------------------------

SHAPES = [(1, 16), (7, 100), (61, 688), (9, 1024)]
SHAPES += [] if INTERPRETED else [(1000, 4096), (300, 6656), (40, 16384)]


def balanced(rows, columns):
    """Rows of +-2 and +-1/2 that sum to exactly 0, in whatever order."""
    generator = torch.Generator().manual_seed(rows + columns)
    half = 2.0 * 4.0 ** -torch.randint(0, 2, (rows, columns // 2), generator=generator)
    row = torch.cat((half, -half, torch.zeros(rows, columns % 2)), 1)
    return row[:, torch.randperm(columns, generator=generator)].to(DEVICE, torch.bfloat16)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("affine", "code", "group_size"), [("none", "sqrt8", 128), ("weight", "e4m3", 16), ("both", "int8", 64)]
)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_kernel(shape, affine, code, group_size, centered):
    x = balanced(*shape) if centered else awkward(*shape)
    weight = None if affine == "none" else torch.randn(shape[1], device=DEVICE).bfloat16()
    bias = torch.randn(shape[1], device=DEVICE).bfloat16() if affine == "both" else None
    *ours, rstd = norm_block_quantize.kernel(x, weight, bias, EPS, centered, code, group_size)
    expected = norm_block_quantize.reference(x, weight, bias, EPS, centered, code, group_size)
    torch.testing.assert_close(rstd, expected[-1], rtol=2e-6, atol=0)
    mean = torch.zeros_like(rstd) if centered else None
    assert_equal(ours, norm_from_statistics(x, mean, rstd, weight, bias, code, group_size))


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_of_a_sum(shape, dtype):
    y, residual = awkward(*shape, dtype), awkward(*shape, dtype, seed=1)
    weight = torch.randn(shape[1], device=DEVICE).bfloat16()
    x, *ours, rstd = add_norm_block_quantize.kernel(y, residual, weight, None, EPS, False, "sqrt8", 128)
    assert_equal(x, residual + y)
    assert_equal(ours, norm_from_statistics(x, None, rstd, weight, None, "sqrt8", 128))


@pytest.mark.kernel
def test_kernel_passes_nan_on():
    x = torch.randn(3, 300, device=DEVICE)
    x[1, 5] = torch.nan
    _, scale, _, group_amax, rstd = norm_block_quantize.kernel(x, None, None, EPS, False, "sqrt8", 128)
    assert rstd.isnan().tolist() == [False, True, False]
    assert scale.isnan().tolist() == [[False, True, False]] * 3
    assert group_amax.isnan().any(1).tolist() == [False, True, False]
