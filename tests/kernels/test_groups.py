"""Kept codes against the formats, and their kernels against them, bit for bit."""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import Quantized, decode_groups, encode_groups, quantize_tensor
from overcoat.kernels import groups as ops
from overcoat.kernels.blockwise import requantize_t
from tests.exact import E4M3_DB, KEPT_DB, assert_close, combined_db
from tests.kernels.compare import AWKWARD_SHAPES, DEVICE, DTYPES, INTERPRETED, assert_equal, awkward
from tests.kernels.samples import normal

codes_ = pytest.mark.parametrize("code", list(KEPT_DB))


@codes_
@pytest.mark.parametrize("tokens", [1, 7, 61])
def test_group_codes_are_the_formats(code, tokens, device):
    x = normal(tokens, 200, dtype=torch.bfloat16).to(device)
    kept, expected = ops.group_encode(x, code, 128), encode_groups(x, code, 128)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(kept, expected, strict=True))
    got = ops.group_decode(*kept, code, 128, torch.bfloat16)
    assert torch.equal(got, decode_groups(expected, code, 128, torch.bfloat16))


@pytest.mark.parametrize("tokens", [1, 61, 255, 256, 257, 511, 700])
def test_token_center_is_the_mean_of_evenly_spaced_rows(tokens, device):
    x = normal(tokens, 5).to(device)
    rows = x[:: -(-tokens // ops.CENTER_ROWS)]
    assert len(rows) <= ops.CENTER_ROWS
    # A mean of n FP32 numbers in any order: n rounding errors of 2^-24 of the largest partial sum, at most sum |x|.
    bound = rows.abs().double().sum(0) * 2.0**-24
    assert ((ops.token_center(x).double() - rows.double().mean(0)).abs() <= bound).all()


@codes_
@pytest.mark.parametrize("affine", ["neither", "weight", "bias", "both"])
def test_requantize_rebuilds_the_forwards_operand(code, affine, device):
    """decode * weight + bias, then E4M3 with the forward's scale: only the kept code's noise is added to E4M3's."""
    x = normal(61, 200).to(device)
    weight = (1 + 0.3 * normal(200, seed=1)).to(device) if affine in ("weight", "both") else None
    bias = (0.5 * normal(200, seed=2)).to(device) if affine in ("bias", "both") else None
    y = (x if weight is None else x * weight) + (0 if bias is None else bias)
    scale = quantize_tensor(y).scale
    kept = encode_groups(x, code, 128)
    operand = requantize_t(*kept, weight, bias, scale, code, 128)
    assert operand.shape == (200, 64)
    assert operand[:, 61:].float().count_nonzero() == 0
    values = operand[:, :61].t().double() * scale.double()
    assert_close("y^T", y, values, combined_db(E4M3_DB, KEPT_DB[code]))
    from_codes = decode_groups(Quantized(*kept), code, 128)
    from_codes = (from_codes if weight is None else from_codes * weight) + (0 if bias is None else bias)
    assert_close("y^T from the codes", from_codes, values, E4M3_DB)


# ---- kernels -----------------------------------------------------------------------------------------------------

GROUPS = [("sqrt8", 128), ("e4m3", 16), ("int8", 80), ("sqrt8", 512)]


@pytest.mark.kernel
@pytest.mark.parametrize("shape", AWKWARD_SHAPES)
@pytest.mark.parametrize(("code", "group_size"), GROUPS)
def test_encode_and_decode_kernels(shape, code, group_size):
    x = awkward(*shape)
    kept = ops.group_encode.reference(x, code, group_size)
    assert_equal(ops.group_encode.kernel(x, code, group_size), kept)
    for dtype in DTYPES:
        arguments = (*kept, code, group_size, dtype)
        assert_equal(ops.group_decode.kernel(*arguments), ops.group_decode.reference(*arguments))


@pytest.mark.kernel
@pytest.mark.parametrize("code", ["sqrt8", "int8"])
@pytest.mark.parametrize("columns", [128, 3])
def test_every_byte_decodes_in_the_kernel(code, columns):
    """Four at a time where a thread holds four, by itself where it does not."""
    codes = torch.arange(-128, 128, device=DEVICE).to(torch.int8).repeat(3).view(-1, columns)
    group_amax = torch.rand(len(codes), 1, device=DEVICE).bfloat16()
    arguments = (codes, group_amax, code, 128, torch.float32)
    assert_equal(ops.group_decode.kernel(*arguments), ops.group_decode.reference(*arguments))


@pytest.mark.kernel
@codes_
def test_extreme_groups_in_the_kernels(code):
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
    kept = ops.group_encode.reference(x, code, 128)
    assert_equal(ops.group_encode.kernel(x, code, 128), kept)
    arguments = (*kept, code, 128, torch.float32)
    assert_equal(ops.group_decode.kernel(*arguments), ops.group_decode.reference(*arguments))


@pytest.mark.kernel
@pytest.mark.parametrize("shape", AWKWARD_SHAPES)
@pytest.mark.parametrize(
    ("code", "group_size", "affine"), [("sqrt8", 128, "both"), ("e4m3", 16, "weight"), ("int8", 80, "none")]
)
def test_requantize_kernel(shape, code, group_size, affine):
    kept = ops.group_encode.reference(awkward(*shape), code, group_size)
    weight = None if affine == "none" else torch.randn(shape[1], device=DEVICE).bfloat16()
    bias = torch.randn(shape[1], device=DEVICE).bfloat16() if affine == "both" else None
    arguments = (*kept, weight, bias, torch.tensor(0.37, device=DEVICE), code, group_size)
    assert_equal(requantize_t.kernel(*arguments), requantize_t.reference(*arguments))
