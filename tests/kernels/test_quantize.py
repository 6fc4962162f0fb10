"""Quantizing ops against their meaning, written out with the formats: `pytest tests/kernels/test_quantize.py`.

The formats have their error bounds in test_formats.py; here layouts, padding, shared scales and fused steps are held,
bit for bit where only bytes move.
"""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import E4M3, FLOAT8, Quantized, decode_groups, encode_groups, quantize_tensor
from overcoat.kernels import groups, stack
from overcoat.kernels import quantize as ops
from tests.exact import E4M3_DB, KEPT_DB, assert_close, combined_db
from tests.kernels.samples import amax, normal

TOKENS = [1, 7, 16, 61]


def decoded(data, scale):
    return data.double() * scale.double()


@pytest.mark.parametrize("tokens", TOKENS)
def test_padded_tokens_is_the_next_multiple_of_16(tokens):
    padded = ops.padded_tokens(tokens)
    assert padded % 16 == 0
    assert tokens <= padded < tokens + 16


def test_amax_sees_every_element_and_nan(device):
    for place in ((0, 0), (6, 129), (3, 64)):
        x = normal(7, 130).to(device, torch.bfloat16)
        x[place] = -9.0
        found = ops.amax(x)
        assert (found.dtype, found.shape, found.item()) == (torch.float32, (), 9.0)
        x[place] = torch.nan
        assert ops.amax(x).isnan()
        x[place] = -torch.inf
        assert ops.amax(x).item() == torch.inf


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_both_layouts_hold_the_same_bytes_and_zeros(tokens, fmt, device):
    x = normal(tokens, 40, dtype=torch.bfloat16).to(device)
    plain, plain_scale = ops.quantize(x, amax(x), fmt)
    data, data_t, scale = ops.quantize_both(x, amax(x), fmt)
    expected = quantize_tensor(x, FLOAT8[fmt])
    assert torch.equal(plain.float(), expected.data.float())
    assert torch.equal(data.float(), expected.data.float())
    assert expected.scale == scale == plain_scale
    assert data_t.shape == (40, ops.padded_tokens(tokens))
    assert data_t.is_contiguous()
    assert torch.equal(data_t[:, :tokens].t().float(), data.float())
    assert data_t[:, tokens:].float().count_nonzero() == 0
    assert torch.equal(ops.quantize_t(x, scale, fmt).float(), data_t.float())


def test_quantize_uses_the_given_amax(device):
    """Group Scaling finds it in the producer; a larger one must not be replaced by the tensor's own."""
    x = normal(7, 40).to(device)
    for amount in (2.0, 0.5):
        data, scale = ops.quantize(x, amax(x) * amount, "e4m3")
        assert scale == (amax(x) * amount) * (1 / 448)
        assert data.float().abs().max() == (448.0 if amount < 1 else 224.0)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_weights_share_one_scale(transposed, device):
    weights = [normal(n, 40, dtype=torch.bfloat16, seed=n).to(device) * n for n in (8, 3, 5)]
    largest = stack.stack_amax(weights)
    assert largest == torch.cat(weights).abs().max()
    data, scale = stack.stack_weights(weights, largest, transposed)
    expected = quantize_tensor(torch.cat(weights), E4M3)
    data = data.t() if transposed else data
    assert data.shape == (16, 40)
    assert torch.equal(data.float(), expected.data.float())
    assert scale == expected.scale


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_reaches_the_decoded_operand(bad, device):
    x = normal(7, 40).to(device)
    x[3, 5] = bad
    data, data_t, scale = ops.quantize_both(x, ops.amax(x), "e5m2")
    assert not decoded(data, scale).isfinite().any()
    assert not decoded(data_t[:, :7], scale).isfinite().any()
    assert not decoded(*stack.stack_weights([x], stack.stack_amax([x]), False)).isfinite().any()


# ---- kept tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", list(KEPT_DB))
@pytest.mark.parametrize("tokens", TOKENS)
def test_group_codes_are_the_formats(code, tokens, device):
    x = normal(tokens, 200, dtype=torch.bfloat16).to(device)
    codes, group_amax = groups.group_encode(x, None, code, 128)
    expected = encode_groups(x, code, 128)
    assert torch.equal(codes.float(), expected.data.float())
    assert torch.equal(group_amax, expected.scale)
    got = groups.group_decode(codes, group_amax, None, code, 128, torch.bfloat16)
    assert torch.equal(got, decode_groups(expected, code, 128, torch.bfloat16))


@pytest.mark.parametrize("code", list(KEPT_DB))
def test_center_is_taken_out_before_and_put_back_after(code, device):
    """A common vector 100 times the values' size costs nothing: SQNR of what remains is the code's own."""
    x = normal(61, 256).to(device)
    center = (100 * normal(256, seed=1)).to(device)
    codes, group_amax = groups.group_encode(x + center, center, code, 128)
    got = groups.group_decode(codes, group_amax, center, code, 128, torch.float32)
    assert_close("x", x, got - center, KEPT_DB[code])
    without, amax_without = groups.group_encode(x + center, None, code, 128)
    plain = groups.group_decode(without, amax_without, None, code, 128, torch.float32)
    assert (plain - center - x).norm() > 10 * (got - center - x).norm()


@pytest.mark.parametrize("centered", [False, True], ids=["", "centered"])
def test_group_encode_amax_also_finds_the_maximum_of_x_itself(centered, device):
    """For the GEMM that reads x: max |x| before the center is taken out."""
    x = (normal(61, 200) + 3).to(device, torch.bfloat16)
    center = x.float().mean(0) if centered else None
    codes, group_amax, largest = groups.group_encode_amax(x, center, "sqrt8", 128)
    expected = groups.group_encode(x, center, "sqrt8", 128)
    assert torch.equal(codes, expected[0])
    assert torch.equal(group_amax, expected[1])
    assert largest == amax(x)


@pytest.mark.parametrize("tokens", [1, 61, 255, 256, 257, 511, 700])
def test_token_center_is_the_mean_of_evenly_spaced_rows(tokens, device):
    x = normal(tokens, 5).to(device)
    rows = x[:: -(-tokens // groups.CENTER_ROWS)]
    assert len(rows) <= groups.CENTER_ROWS
    # A mean of n FP32 numbers in any order: n rounding errors of 2^-24 of the largest partial sum, at most sum |x|.
    bound = rows.abs().double().sum(0) * 2.0**-24
    assert ((groups.token_center(x).double() - rows.double().mean(0)).abs() <= bound).all()


def test_token_center_keeps_a_common_vector_exactly(device):
    vector = normal(9, seed=1).to(device, torch.bfloat16)
    torch.testing.assert_close(groups.token_center(vector.expand(64, 9)), vector.float(), rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("code", list(KEPT_DB))
@pytest.mark.parametrize("affine", ["neither", "weight", "bias", "both"])
def test_requantize_rebuilds_the_forwards_operand(code, affine, device):
    """decode * weight + bias, then E4M3 with the forward's scale: only the kept code's noise is added to E4M3's."""
    x = normal(61, 200).to(device)
    weight = (1 + 0.3 * normal(200, seed=1)).to(device) if affine in ("weight", "both") else None
    bias = (0.5 * normal(200, seed=2)).to(device) if affine in ("bias", "both") else None
    y = (x if weight is None else x * weight) + (0 if bias is None else bias)
    scale = quantize_tensor(y).scale
    kept = encode_groups(x, code, 128)
    operand = groups.requantize_t(*kept, weight, bias, scale, code, 128)
    assert operand.shape == (200, 64)
    assert operand[:, 61:].float().count_nonzero() == 0
    assert_close("y^T", y, decoded(operand, scale)[:, :61].t(), combined_db(E4M3_DB, KEPT_DB[code]))
    from_codes = decode_groups(Quantized(*kept), code, 128)
    from_codes = (from_codes if weight is None else from_codes * weight) + (0 if bias is None else bias)
    assert_close("y^T from the codes", from_codes, decoded(operand, scale)[:, :61].t(), E4M3_DB)


def test_requantize_of_exact_codes_is_bit_equal(device):
    """Integers times a power of two: the kept form holds them exactly, so the operand is the forward's own."""
    x = torch.randint(-127, 128, (61, 128), generator=torch.Generator().manual_seed(0)).float().to(device)
    x[:, 0] = 127
    data, scale = quantize_tensor(x)
    operand = groups.requantize_t(*encode_groups(x, "int8", 128), None, None, scale, "int8", 128)
    assert torch.equal(operand[:, :61].t().float(), data.float())
