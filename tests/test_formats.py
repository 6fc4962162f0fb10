"""Formats and granularities, property by property: `pytest tests/test_formats.py`.

Every error bound is the format's own: half the spacing of its grid where the value lies. On top comes SLACK for the
FP32 arithmetic around the rounding (a reciprocal and two products, each exact to 2^-24): a value that close to the
middle between two codes may take either.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from overcoat.formats import (
    AMAX_FLOOR,
    E4M3,
    E5M2,
    GROUP_CODES,
    Float8,
    Quantized,
    _values,
    cast_float8,
    decode_float8,
    decode_groups,
    dequantize_blocks,
    dequantize_tensor,
    encode_groups,
    from_groups,
    group_code,
    quantize_blocks,
    quantize_tensor,
    to_groups,
)
from tests.emulation import sqnr
from tests.exact import E4M3_DB, E5M2_DB, KEPT_DB

SLACK = 2.0**-21
MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
CODES = list(GROUP_CODES)
formats = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
codes = pytest.mark.parametrize("code", CODES)
group_sizes = st.sampled_from([1, 2, 16, 32, 128])

# The largest BF16 number: a group's maximum is stored in BF16.
BF16_MAX = torch.finfo(torch.bfloat16).max
any_floats = st.floats(-BF16_MAX, BF16_MAX, width=32)


@st.composite
def tensors(draw: st.DrawFn, max_rows: int = 5, max_columns: int = 300) -> Tensor:
    """Matrices of all widths: arbitrary FP32 bit patterns (denormals too), or Gaussians spread over many octaves."""
    rows, columns = draw(st.integers(1, max_rows)), draw(st.integers(1, max_columns))
    if draw(st.booleans()):
        values = draw(st.lists(any_floats, min_size=1, max_size=24))
        return torch.tensor(values).repeat(rows * columns // len(values) + 1)[: rows * columns].view(rows, columns)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread, centre = draw(st.integers(0, 60)), draw(st.integers(-60, 60))
    octaves = torch.randint(centre - spread, centre + spread + 1, (rows, columns), generator=generator)
    return torch.ldexp(torch.randn(rows, columns, generator=generator), octaves)


def half_spacing(t: Tensor, fmt: Float8) -> Tensor:
    """Half the distance between neighbours of |t| in the format's own unit."""
    exponent = torch.floor(torch.log2(t.abs().clamp_min(1e-300))) - MANTISSA_BITS[fmt.name]
    return torch.exp2(exponent).clamp_min(fmt.tiny) / 2


def check_float8(x: Tensor, decoded: Tensor, scale: Tensor, fmt: Float8) -> None:
    """|decoded - x| is at most half a spacing at x; x beyond the range by less than that saturates."""
    t = x.double() / scale.double()
    bound = half_spacing(t, fmt) + t.abs() * SLACK
    assert ((decoded.double() / scale.double() - t).abs() <= bound).all()


# ---- the formats -------------------------------------------------------------------------------------------------


@formats
def test_constants_are_the_dtypes(fmt):
    info = torch.finfo(fmt.dtype)
    assert (fmt.max, fmt.tiny) == (info.max, info.smallest_normal * 2.0 ** -MANTISSA_BITS[fmt.name])


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


# ---- one scale per tensor ----------------------------------------------------------------------------------------


@formats
@given(x=tensors())
def test_tensor_error_is_half_a_spacing(fmt, x):
    q = quantize_tensor(x, fmt)
    assert q.data.dtype == fmt.dtype
    assert q.data.shape == x.shape
    assert q.scale.shape == ()
    assert q.scale.dtype == torch.float32
    check_float8(x, dequantize_tensor(q), q.scale, fmt)


@formats
@given(x=tensors())
def test_tensor_maximum_uses_the_whole_range(fmt, x):
    """A scale twice too large loses a bit of range for small values without breaking any bound relative to itself."""
    q = quantize_tensor(x, fmt)
    if x.abs().amax() >= fmt.max * 2.0**-126:
        assert q.data.float().abs().amax() == fmt.max


@formats
@given(x=tensors())
def test_tensor_requantizing_is_exact(fmt, x):
    q = quantize_tensor(x, fmt)
    again = quantize_tensor(dequantize_tensor(q), fmt, x.abs().amax())
    assert torch.equal(again.data.view(torch.uint8), q.data.view(torch.uint8))


@formats
def test_tensor_known_amax_is_used(fmt):
    """Values above the given maximum saturate, they do not become NaN or wrap."""
    x = torch.tensor([[0.5, -8.0, 3.0]])
    q = quantize_tensor(x, fmt, torch.tensor(2.0))
    assert q.scale == 2.0 / fmt.max
    assert dequantize_tensor(q).tolist() == [[0.5, -2.0, 2.0]]


@formats
def test_tensor_all_zero_has_scale_one(fmt):
    q = quantize_tensor(torch.zeros(3, 5), fmt)
    assert q.scale == 1.0
    assert dequantize_tensor(q).count_nonzero() == 0


@formats
@pytest.mark.parametrize("value", [1.0, -3.7e-5, 2.0**-140, -(2.0**-149), 3e38])
def test_tensor_constant_and_one_element(fmt, value):
    """The maximum maps to the format's maximum, so it comes back to FP32 rounding; denormals to a spacing's half."""
    for shape in ((), (1,), (4, 7)):
        x = torch.full(shape, value)
        q = quantize_tensor(x, fmt)
        decoded = dequantize_tensor(q)
        assert decoded.shape == shape
        if abs(value) > fmt.max * 2.0**-126:
            torch.testing.assert_close(decoded, x, rtol=2.0**-22, atol=0)
        else:
            check_float8(x, decoded, q.scale, fmt)


@formats
@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)])
def test_tensor_empty(fmt, shape):
    q = quantize_tensor(torch.empty(shape), fmt)
    assert q.data.shape == shape
    assert q.scale == 1.0


@formats
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_tensor_non_finite_reaches_every_value(fmt, bad):
    x = torch.ones(4, 4)
    x[1, 2] = bad
    assert not dequantize_tensor(quantize_tensor(x, fmt)).isfinite().any()


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensor_takes_other_dtypes_and_strides(fmt, dtype):
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    contiguous = quantize_tensor(x.t().contiguous(), fmt)
    strided = quantize_tensor(x.t(), fmt)
    assert torch.equal(contiguous.data.float(), strided.data.float())
    assert torch.equal(contiguous.data.float(), quantize_tensor(x.float().t(), fmt).data.float())
    assert contiguous.scale == strided.scale


@pytest.mark.parametrize(("fmt", "db"), [(E4M3, E4M3_DB), (E5M2, E5M2_DB)], ids=["e4m3", "e5m2"])
def test_tensor_sqnr_of_gaussians(fmt, db):
    """31.5 and 25.5 dB (NUMERICS.md section 8), the numbers that the other tests' limits are made of.

    Derived: with m mantissa bits the error is uniform in a cell of 2^(e-m), so its relative power is 4^-m / 12 over the
    mean of the squared mantissa; a factor 4 = 6 dB between the formats.
    """
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    assert sqnr(x, dequantize_tensor(quantize_tensor(x, fmt))) == pytest.approx(db, abs=0.15)


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


# ---- one maximum per group ---------------------------------------------------------------------------------------


def expanded_amax(q: Quantized, group_size: int) -> Tensor:
    """Each element's group maximum, FP64, (R, C)."""
    columns = q.data.shape[-1]
    return q.scale.double().repeat_interleave(group_size, 1)[:, :columns]


def check_group_error(x: Tensor, q: Quantized, code: str, group_size: int) -> None:
    """The code's own half step, in units of the stored maximum M.

    e4m3: half a spacing of x * 448/M. int8: M/254. sqrt8: s = 127 sqrt(|x|/M) is rounded by at most 1/2, so
    |x' - x| <= M/127^2 * (s + 1/4). M is rounded to BF16, by at most 2^-8: a maximum rounded down saturates, which
    costs less than the half step of the topmost code in each code (448/256, 127/256, 127/512 code units).
    """
    amax = expanded_amax(q, group_size)
    decoded = decode_groups(q, code, group_size).double()
    dead = amax < AMAX_FLOOR
    assert (decoded[dead] == 0).all()
    amax, x, error = amax[~dead], x.double()[~dead], (decoded - x.double())[~dead].abs()
    if code == "e4m3":
        bound = half_spacing(x * 448 / amax, E4M3) * amax / 448
    elif code == "int8":
        bound = amax / 254
    else:
        bound = amax / 127**2 * (127 * torch.sqrt(x.abs() / amax) + 0.25)
    assert (error <= bound + amax * SLACK).all()


@codes
@given(x=tensors(), group_size=group_sizes)
def test_group_error_is_half_a_step(code, x, group_size):
    q = encode_groups(x, code, group_size)
    assert q.data.dtype == group_code(code).dtype
    assert q.data.shape == x.shape
    assert q.data.is_contiguous()
    assert q.scale.dtype == torch.bfloat16
    assert q.scale.shape == (x.shape[0], -(-x.shape[1] // group_size))
    check_group_error(x, q, code, group_size)


@codes
@given(x=tensors(), group_size=group_sizes)
def test_group_maximum_is_the_groups_own_in_bf16(code, x, group_size):
    q = encode_groups(x, code, group_size)
    for group in range(q.scale.shape[1]):
        part = x[:, group * group_size : (group + 1) * group_size]
        assert torch.equal(q.scale[:, group], part.abs().amax(1).to(torch.bfloat16))


@codes
@given(x=tensors(), group_size=group_sizes, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_group_recoding_is_exact(code, x, group_size, dtype):
    """Codes of decoded values are the codes, through BF16 too: its half spacing, 2^-9 to 2^-8 of a value, is less than
    half a step at the topmost code of each grid (127 * 2^-8 / (1 + 2^-8) < 1/2)."""
    q = encode_groups(x, code, group_size)
    again = encode_groups(decode_groups(q, code, group_size, dtype), code, group_size)
    alive = expanded_amax(q, group_size) >= AMAX_FLOOR
    assert torch.equal(again.data.float()[alive], q.data.float()[alive])
    stored = q.scale.float()
    assert torch.equal(again.scale.float()[stored >= AMAX_FLOOR], stored[stored >= AMAX_FLOOR])


@codes
@given(x=tensors(max_rows=3, max_columns=80), group_size=st.sampled_from([1, 16, 32]))
def test_groups_do_not_see_each_other(code, x, group_size):
    """Each group, tails included, cut out and encoded alone gives the same bytes."""
    q = encode_groups(x, code, group_size)
    for row in range(x.shape[0]):
        for group, start in enumerate(range(0, x.shape[1], group_size)):
            place = (slice(row, row + 1), slice(start, start + group_size))
            alone = encode_groups(x[place], code, group_size)
            assert torch.equal(alone.data.view(torch.uint8), q.data[place].view(torch.uint8))
            assert torch.equal(alone.scale, q.scale[row : row + 1, group : group + 1])


@codes
@given(x=tensors(max_rows=2), group_size=group_sizes)
def test_group_code_is_odd(code, x, group_size):
    plus, minus = (decode_groups(encode_groups(y, code, group_size), code, group_size) for y in (x, -x))
    assert torch.equal(plus, -minus)


@codes
def test_group_all_zero_and_constant(code):
    zero = encode_groups(torch.zeros(2, 5), code, 4)
    assert decode_groups(zero, code, 4).count_nonzero() == 0
    assert zero.scale.count_nonzero() == 0
    for value in (1.0, -0.375, 2.0**-99, -(2.0**120)):  # exact in BF16: a group's maximum comes back to FP32 rounding
        x = torch.full((2, 5), value)
        torch.testing.assert_close(decode_groups(encode_groups(x, code, 4), code, 4), x, rtol=2.0**-22, atol=0)


@codes
@pytest.mark.parametrize("tiny", [2.0**-149, 2.0**-127, 2.0**-101])
def test_group_of_denormals_decodes_to_zero_beside_a_living_group(code, tiny):
    x = torch.tensor([[tiny, -tiny, 1.0, -1.0]])
    decoded = decode_groups(encode_groups(x, code, 2), code, 2)
    torch.testing.assert_close(decoded, torch.tensor([[0.0, 0.0, 1.0, -1.0]]), rtol=2.0**-22, atol=0)


@codes
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_group_non_finite_reaches_its_whole_group_and_no_other(code, bad):
    x = torch.ones(2, 8)
    x[0, 1] = bad
    decoded = decode_groups(encode_groups(x, code, 4), code, 4)
    assert not decoded[0, :4].isfinite().any()
    torch.testing.assert_close(decoded[0, 4:], x[0, 4:], rtol=2.0**-22, atol=0)
    torch.testing.assert_close(decoded[1], x[1], rtol=2.0**-22, atol=0)


@codes
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 8), (3, 0), (2, 3, 5), (1, 129)])
def test_group_shapes(code, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    q = encode_groups(x, code, 4)
    assert q.data.shape == shape
    columns = shape[-1] if shape else 1
    assert q.scale.shape == (math.prod(shape[:-1]), -(-columns // 4))
    decoded = decode_groups(q, code, 4, torch.bfloat16)
    assert decoded.shape == shape
    assert decoded.dtype == torch.bfloat16
    assert decoded.is_contiguous()
    if x.numel():
        assert sqnr(x, decoded) > 24  # nothing moved: E4M3, the coarsest, has 27.1 dB at worst (half of 2^-3 at 1.0)


@codes
def test_group_takes_non_contiguous_and_16_bit_input(code):
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    q = encode_groups(x.t(), code, 4)
    expected = encode_groups(x.t().contiguous().float(), code, 4)
    assert torch.equal(q.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(q.scale, expected.scale)
    strided = Quantized(q.data.t().contiguous().t(), q.scale.t().contiguous().t())
    assert torch.equal(decode_groups(strided, code, 4), decode_groups(expected, code, 4))


@given(x=tensors(), group_size=group_sizes)
def test_groups_there_and_back(x, group_size):
    groups = to_groups(x, group_size)
    assert groups.shape == (x.shape[0], -(-x.shape[1] // group_size), group_size)
    assert torch.equal(from_groups(groups, x.shape), x)
    tail = -x.shape[1] % group_size
    if tail:
        assert groups[:, -1, -tail:].count_nonzero() == 0


@codes
def test_a_kept_tensor_holds_no_padding(code):
    """130 columns in groups of 128: 130 bytes a row stay, not 256."""
    q = encode_groups(torch.randn(16, 130), code, 128)
    assert q.data.untyped_storage().nbytes() == 16 * 130


# NUMERICS.md section 8: SQNR over the 127 others, one outlier of so many sigma in the group of 128.
OUTLIERS = {
    "e4m3": {0: 31.8, 10: 31.5, 30: 31.5, 100: 31.5, 1000: 31.5},
    "int8": {0: 43.8, 10: 32.9, 30: 23.3, 100: 12.9, 1000: 0.0},
    "sqrt8": {0: 43.4, 10: 37.8, 30: 33.1, 100: 27.8, 1000: 17.8},
}


@codes
def test_sqnr_beside_one_outlier(code):
    """The measured table, to 0.25 dB below: 4096 groups estimate a noise power to 0.1 dB."""
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    for sigmas, db in OUTLIERS[code].items():
        if sigmas:
            x[:, 0] = sigmas
        decoded = decode_groups(encode_groups(x, code), code)
        first = 1 if sigmas else 0
        assert sqnr(x[:, first:], decoded[:, first:]) >= db - 0.25, sigmas


def test_sqrt8_lies_above_both_rivals_from_10_to_30_sigma():
    """Why it is the default: NUMERICS.md section 8, last sentence."""
    assert KEPT_DB["sqrt8"] == OUTLIERS["sqrt8"][0]
    for sigmas in (10, 30):
        x = torch.randn(1024, 128, generator=torch.Generator().manual_seed(sigmas))
        x[:, 0] = sigmas
        db = {code: sqnr(x[:, 1:], decode_groups(encode_groups(x, code), code)[:, 1:]) for code in CODES}
        assert db["sqrt8"] > max(db["e4m3"], db["int8"]) + 1


def test_unknown_code_is_named_with_the_known():
    with pytest.raises(ValueError, match=r"'log8'.*sqrt8, e4m3, int8"):
        encode_groups(torch.zeros(1, 1), "log8")


@formats
def test_decoding_float8_is_the_conversion_bit_for_bit(fmt, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(fmt.dtype)
    for these in (codes, codes.view(16, 16).t(), codes[::3], codes[:0], codes[7]):
        decoded = decode_float8(these)
        assert decoded.shape == these.shape
        assert torch.equal(decoded.view(torch.int32), these.float().view(torch.int32))


def test_decoding_float8_first_in_inference_mode_serves_training():
    _values.cache_clear()
    codes = torch.ones(4).to(E4M3.dtype)
    with torch.inference_mode():
        decode_float8(codes)
    weight = torch.ones(4, requires_grad=True)
    (decode_float8(codes) * weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(4))
