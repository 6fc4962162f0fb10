"""The kernels of kernels/gpu/groups.py equal their references (see compare.py for how)."""

from __future__ import annotations

import pytest
import torch

from overcoat.kernels import groups
from overcoat.kernels import quantize as ops
from tests.kernels.gpu.compare import DEVICE, INTERPRETED, NEEDS_GPU, assert_equal, awkward
from tests.kernels.gpu.quantize_cases import DTYPES, SHAPES

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("code", ["sqrt8", "e4m3", "int8"])
@pytest.mark.parametrize("group_size", [16, 80, 128, 512])
@pytest.mark.parametrize("centered", [False, True])
def test_group_codes(shape, code, group_size, centered):
    x = awkward(*shape)
    center = torch.randn(shape[1], device=DEVICE) if centered else None
    codes, amax = groups.group_encode.reference(x, center, code, group_size)
    assert_equal(groups.group_encode.kernel(x, center, code, group_size), (codes, amax))
    with_amax = (codes, amax, ops.amax.reference(x))
    assert_equal(groups.group_encode_amax.kernel(x, center, code, group_size), with_amax)
    for dtype in DTYPES:
        arguments = (codes, amax, center, code, group_size, dtype)
        assert_equal(groups.group_decode.kernel(*arguments), groups.group_decode.reference(*arguments))


@pytest.mark.parametrize("code", ["sqrt8", "int8"])
@pytest.mark.parametrize("columns", [128, 3])
def test_every_byte_decodes(code, columns):
    """Four at a time where a thread holds four, by itself where it does not."""
    codes = torch.arange(-128, 128, device=DEVICE).to(torch.int8).repeat(3).view(-1, columns)
    amax = torch.rand(len(codes), 1, device=DEVICE).bfloat16()
    arguments = (codes, amax, None, code, 128, torch.float32)
    assert_equal(groups.group_decode.kernel(*arguments), groups.group_decode.reference(*arguments))


@pytest.mark.parametrize("shape", [(1, 16), (7, 100), (300, 688), (1000, 4096)])
def test_token_center(shape):
    """A mean, summed in another order than the reference's."""
    x = awkward(*shape).clamp(-10, 10)
    torch.testing.assert_close(groups.token_center.kernel(x), groups.token_center.reference(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("code", ["sqrt8", "e4m3", "int8"])
def test_group_codes_of_extremes(code):
    """Groups with NaN, infinities, values near FP32's ends, and the roots' ties."""
    if INTERPRETED and code == "e4m3":
        pytest.skip("the interpreter's FP8 conversion knows no NaN")
    x = torch.randn(8, 128, device=DEVICE)
    x[0, 3], x[1, 4], x[2, 5] = torch.nan, torch.inf, -torch.inf
    x[3] *= 1e-38
    x[4] *= 1e-30
    x[5] *= 1e37
    x[6] = (torch.arange(128, device=DEVICE) + 0.5) ** 2
    x[7] = torch.arange(128, device=DEVICE) - 64
    codes, amax = groups.group_encode.reference(x, None, code, 128)
    assert_equal(groups.group_encode.kernel(x, None, code, 128), (codes, amax))
    arguments = (codes, amax, None, code, 128, torch.float32)
    assert_equal(groups.group_decode.kernel(*arguments), groups.group_decode.reference(*arguments))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("where", "centered"), [("x", False), ("x", True), ("center", True)])
def test_no_bad_value_is_passed_over(value, where, centered):
    """In the last row, behind a larger one that other programs have found. The maximum is x's, not x - center's."""
    x, center = torch.randn(40, 688, device=DEVICE).bfloat16(), torch.randn(688, device=DEVICE) if centered else None
    x[0, 0] = 1e4
    if where == "x":
        x[-1, -1] = value
    else:
        center[-1] = value
    arguments = (x, center, "sqrt8", 128)
    ours, theirs = groups.group_encode_amax.kernel(*arguments), groups.group_encode_amax.reference(*arguments)
    assert_equal(ours, theirs)
    assert ours[2].isfinite() == (where == "center")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("code", "group_size"), [("sqrt8", 128), ("e4m3", 16), ("int8", 80)])
@pytest.mark.parametrize("affine", ["none", "weight", "both"])
def test_requantize_t(shape, code, group_size, affine):
    codes, amax = groups.group_encode.reference(awkward(*shape), None, code, group_size)
    weight = None if affine == "none" else torch.randn(shape[1], device=DEVICE).bfloat16()
    bias = torch.randn(shape[1], device=DEVICE).bfloat16() if affine == "both" else None
    arguments = (codes, amax, weight, bias, torch.tensor(0.37, device=DEVICE), code, group_size)
    assert_equal(groups.requantize_t.kernel(*arguments), groups.requantize_t.reference(*arguments))
