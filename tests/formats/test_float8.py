"""FP8 operands, property by property: one scale per tensor or block."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from overcoat.formats import (
    E4M3,
    E5M2,
    Float8,
    Quantized,
    cast_float8,
    decode_float8,
    dequantize_blocks,
    quantize_blocks,
    quantize_tensor,
    scale_blocks,
)
from tests.emulation import sqnr
from tests.exact import E4M3_DB, E5M2_DB
from tests.formats.samples import MANTISSA_BITS, SLACK, half_spacing, tensors

formats = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def check_float8(x: Tensor, decoded: Tensor, scale: Tensor, fmt: Float8) -> None:
    """|decoded - x| is at most half a spacing at x; x beyond the range by less than that saturates."""
    t = x.double() / scale.double()
    bound = half_spacing(t, fmt) + t.abs() * SLACK
    assert ((decoded.double() / scale.double() - t).abs() <= bound).all()


# ---- the formats -------------------------------------------------------------------------------------------------


@formats
def test_cast_saturates_and_keeps_nan(fmt):
    x = torch.tensor([fmt.max * 1.2, -1e30, torch.inf, -torch.inf, torch.nan, 0.0, fmt.tiny, fmt.tiny * 0.49])
    got = cast_float8(x, fmt).float()
    assert got[:4].tolist() == [fmt.max, -fmt.max, fmt.max, -fmt.max]
    assert got[4].isnan()
    assert got[5:].tolist() == [0.0, fmt.tiny, 0.0]


@formats
def test_cast_rounds_ties_to_even(fmt):
    one = 2.0 ** -MANTISSA_BITS[fmt.name]  # spacing just above 1
    x = torch.tensor([1 + one / 2, 1 + 3 * one / 2, -1 - one / 2, fmt.tiny / 2, 3 * fmt.tiny / 2])
    assert cast_float8(x, fmt).float().tolist() == [1.0, 1 + 2 * one, -1.0, 0.0, 2 * fmt.tiny]


def dequantized(q: Quantized) -> Tensor:
    """data * scale, FP32, of one scale."""
    return decode_float8(q.data) * q.scale


# ---- one scale per tensor ----------------------------------------------------------------------------------------


@formats
@given(x=tensors())
def test_tensor_error_is_half_a_spacing(fmt, x):
    q = quantize_tensor(x, fmt)
    assert q.data.dtype == fmt.dtype
    assert q.data.shape == x.shape
    assert q.scale.shape == ()
    assert q.scale.dtype == torch.float32
    check_float8(x, dequantized(q), q.scale, fmt)


@formats
@given(x=tensors())
def test_tensor_maximum_uses_the_whole_range(fmt, x):
    """A scale twice too large loses a bit of range for small values without breaking any bound relative to itself."""
    q = quantize_tensor(x, fmt)
    if x.abs().amax() >= fmt.max * 2.0**-126:
        assert q.data.float().abs().amax() == fmt.max


@formats
def test_tensor_all_zero_has_scale_one(fmt):
    q = quantize_tensor(torch.zeros(3, 5), fmt)
    assert q.scale == 1.0
    assert dequantized(q).count_nonzero() == 0


@formats
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_tensor_non_finite_reaches_every_value(fmt, bad):
    x = torch.ones(4, 4)
    x[1, 2] = bad
    assert not dequantized(quantize_tensor(x, fmt)).isfinite().any()


@pytest.mark.parametrize(("fmt", "db"), [(E4M3, E4M3_DB), (E5M2, E5M2_DB)], ids=["e4m3", "e5m2"])
def test_tensor_sqnr_of_gaussians(fmt, db):
    """31.5 and 25.5 dB (NUMERICS.md section 8), the numbers that the other tests' limits are made of.

    Derived: with m mantissa bits the error is uniform in a cell of 2^(e-m), so its relative power is 4^-m / 12 over the
    mean of the squared mantissa; a factor 4 = 6 dB between the formats.
    """
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    assert sqnr(x, dequantized(quantize_tensor(x, fmt))) == pytest.approx(db, abs=0.15)


# ---- one scale per block -----------------------------------------------------------------------------------------

block_shapes = st.sampled_from([(1, 128), (128, 128), (16, 16), (3, 5), (1, 1)])


@formats
@given(x=tensors(max_rows=40, max_columns=40), block=block_shapes)
def test_block_error_is_half_a_spacing(fmt, x, block):
    q = quantize_blocks(x, block, fmt)
    assert q.scale.shape == (-(-x.shape[0] // block[0]), -(-x.shape[1] // block[1]))
    decoded = dequantize_blocks(q, block)
    assert decoded.shape == x.shape
    scale = q.scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: x.shape[0], : x.shape[1]]
    check_float8(x, decoded, scale, fmt)


@formats
@given(x=tensors(max_rows=20, max_columns=20), block=block_shapes)
def test_each_block_equals_itself_alone(fmt, x, block):
    """A block sees no neighbour and no padding: cut out and quantized per tensor it gives the same bytes."""
    q = quantize_blocks(x, block, fmt)
    for i in range(q.scale.shape[0]):
        for j in range(q.scale.shape[1]):
            place = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            alone = quantize_tensor(x[place], fmt)
            assert torch.equal(alone.data.view(torch.uint8), q.data[place].view(torch.uint8))
            assert alone.scale == q.scale[i, j]
            if i * j > 4:
                return  # the far blocks say nothing new


def test_matrices_of_a_stack_are_scaled_each():
    """Their blocks end with each matrix."""
    x, scale = torch.randn(3, 2, 5, 7), torch.randn(3, 2, 2, 3)
    whole = scale_blocks(x, scale, (4, 3))
    assert whole.shape == x.shape
    for i, j in itertools.product(range(3), range(2)):
        spread = scale[i, j].repeat_interleave(4, 0).repeat_interleave(3, 1)[:5, :7]
        assert torch.equal(whole[i, j], x[i, j] * spread)


@formats
def test_block_edges(fmt):
    for shape in ((0, 8), (3, 0)):
        q = quantize_blocks(torch.empty(shape), (2, 4), fmt)
        assert dequantize_blocks(q, (2, 4)).shape == shape
    zero = quantize_blocks(torch.zeros(5, 7), (2, 4), fmt)
    assert (zero.scale == 1).all()
    assert dequantize_blocks(zero, (2, 4)).count_nonzero() == 0
    x = torch.ones(4, 8)
    x[0, 1] = torch.nan
    decoded = dequantize_blocks(quantize_blocks(x, (2, 4), fmt), (2, 4))
    assert not decoded[:2, :4].isfinite().any()
    assert torch.equal(decoded[2:], x[2:])
    assert torch.equal(decoded[:, 4:], x[:, 4:])


def test_blocks_want_a_matrix():
    with pytest.raises(ValueError, match=r"\(2, 3, 4\).*flatten"):
        quantize_blocks(torch.zeros(2, 3, 4), (2, 2))


@formats
def test_decoding_float8_is_the_conversion_bit_for_bit(fmt, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(fmt.dtype)
    for these in (codes, codes.view(16, 16).t(), codes[::3], codes[:0], codes[7]):
        decoded = decode_float8(these)
        assert decoded.shape == these.shape
        assert torch.equal(decoded.view(torch.int32), these.float().view(torch.int32))
