"""Quantizing ops against the formats, and their kernels against them, bit for bit.

The formats have their error bounds in tests/formats; here layouts, padding, maxima and scales are held."""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import E4M3, FLOAT8, quantize_blocks, quantize_tensor
from overcoat.kernels import quantize as ops
from overcoat.kernels.blockwise import blocks
from overcoat.kernels.weights import block_stack_weights, numbers_of, quantize_operands, stack_codes, stack_weights
from tests.kernels.compare import AWKWARD_SHAPES, DEVICE, DTYPES, assert_equal, awkward
from tests.kernels.samples import amax, normal

TOKENS = [1, 7, 16, 61]
formats = pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])


def decoded(data, scale):
    return data.double() * scale.double()


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
@formats
def test_both_layouts_hold_the_same_bytes_and_zeros(tokens, fmt, device):
    x = normal(tokens, 40, dtype=torch.bfloat16).to(device)
    plain, plain_scale = ops.quantize(x, amax(x), fmt)
    data, data_t, scale = ops.quantize_both(x, amax(x), fmt)
    expected = quantize_tensor(x, FLOAT8[fmt])
    assert torch.equal(plain.float(), expected.data.float())
    assert torch.equal(data.float(), expected.data.float())
    assert expected.scale == scale == plain_scale
    padded = ops.padded_tokens(tokens)
    assert padded % 16 == 0 and tokens <= padded < tokens + 16  # noqa: PT018
    assert data_t.shape == (40, padded)
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


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_reaches_the_decoded_operand(bad, device):
    x = normal(7, 40).to(device)
    x[3, 5] = bad
    data, data_t, scale = ops.quantize_both(x, ops.amax(x), "e5m2")
    assert not decoded(data, scale).isfinite().any()
    assert not decoded(data_t[:, :7], scale).isfinite().any()


# ---- kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(), (1,), (7, 100), (300, 1000)])  # one program, and many that share a maximum
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1.0, -torch.inf, torch.nan])
def test_amax_kernel(shape, dtype, value):
    x = torch.randn(shape, device=DEVICE).to(dtype)
    x.view(-1)[x.numel() // 3] = value
    assert_equal(ops.amax.kernel(x), ops.amax.reference(x))


@pytest.mark.kernel
@pytest.mark.parametrize("shape", AWKWARD_SHAPES)
@pytest.mark.parametrize(("fmt", "dtype"), [("e4m3", torch.bfloat16), ("e5m2", torch.float32), ("e4m3", torch.float16)])
def test_quantize_kernels(shape, fmt, dtype):
    x = awkward(*shape, dtype)
    top = ops.amax.reference(x)
    for op in (ops.quantize, ops.quantize_both, ops.quantize_t):
        assert_equal(op.kernel(x, top, fmt), op.reference(x, top, fmt))


@pytest.mark.kernel
@pytest.mark.parametrize("top", [0.0, 1e-38, 1e-44, torch.inf, torch.nan, 2.5])
@formats
def test_extreme_scales_in_the_kernel(top, fmt):
    """Scales at the ends of the range, and values that saturate; padding stays zero even so."""
    x = torch.tensor([[0.0, 1e-38, -3.0, 1e30, torch.inf, -torch.inf, torch.nan]], device=DEVICE)
    arguments = (x, torch.tensor(top, device=DEVICE), fmt)
    assert_equal(ops.quantize_both.kernel(*arguments), ops.quantize_both.reference(*arguments))


@pytest.mark.parametrize("shape", AWKWARD_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@formats
@pytest.mark.kernel
def test_rows_kernel(shape, dtype, fmt):
    x = awkward(*shape, dtype)
    assert_equal(ops.quantize_rows.kernel(x, fmt), ops.quantize_rows.reference(x, fmt))


def test_each_row_has_its_own_scale(device):
    x = normal(5, 40).to(device) * torch.tensor([1.0, 1e-6, 0.0, 1e5, 1.0], device=device)[:, None]
    data, scale = ops.quantize_rows(x, "e4m3")
    for row, codes, each in zip(x, data, scale):
        expected = quantize_tensor(row[None], E4M3)
        assert torch.equal(codes.float(), expected.data[0].float())
        assert each == expected.scale


# ---- Weights stacked into one operand, with one scale or in 128x128 blocks, and their kernels, bit for bit ----------


layouts = pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])


@layouts
def test_stacked_weights_share_one_scale(transposed, device):
    weights = [normal(n, 40, dtype=torch.bfloat16, seed=n).to(device) * n for n in (8, 3, 5)]
    data, *numbers = quantize_operands(weights, [3], [])
    scale, largest = [each for number in numbers for each in numbers_of(number)]
    assert largest == torch.cat(weights).abs().max()
    if transposed:
        data, scale = stack_weights(weights, largest, True)
    expected = quantize_tensor(torch.cat(weights), E4M3)
    data = data.t() if transposed else data
    assert data.shape == (16, 40)
    assert torch.equal(data.float(), expected.data.float())
    assert scale == expected.scale


@pytest.mark.parametrize("sizes", [(128, 256), (128, 100), (40, 30, 70), (130,)])
@pytest.mark.parametrize("columns", [24, 640])
def test_blocks_of_stacked_weights(sizes, columns, device):
    """One matrix whose blocks may span two weights; its transpose holds the same numbers, scales included."""
    weights = [(10.0**i * normal(n, columns, seed=n)).to(device, torch.bfloat16) for i, n in enumerate(sizes)]
    stacked = torch.cat(weights)
    data, scale = block_stack_weights(weights, False)
    expected = quantize_blocks(stacked, (128, 128), E4M3)
    rows, width = blocks(stacked.shape[0]), blocks(columns)
    assert scale.shape == (rows, -(-width // 4) * 4)
    assert torch.equal(data.float(), expected.data.float())
    assert torch.equal(scale[:, :width], expected.scale)
    assert scale[:, width:].count_nonzero() == 0
    data_t, scale_t = block_stack_weights(weights, True)
    assert scale_t.shape == (width, -(-rows // 4) * 4)
    assert torch.equal(data_t.t().float(), data.float())
    assert torch.equal(scale_t[:, :rows].t(), scale[:, :width])
    assert scale_t[:, rows:].count_nonzero() == 0


# ---- kernels -----------------------------------------------------------------------------------------------------


# Weights of one launch and of two; a row's end and a tile's, alone and together.
stacks = pytest.mark.parametrize(
    ("sizes", "columns"),
    [([16], 77), ([48, 16], 336), ([16, 48, 16], 1040), ([100, 61], 77), ([130, 2, 4, 64, 18], 336)],
)


@pytest.mark.kernel
@layouts
@stacks
def test_stack_kernels(sizes, columns, transposed):
    weights = [awkward(rows, columns, seed=i) for i, rows in enumerate(sizes)]
    found = quantize_operands.kernel(weights, [len(weights)], [])
    assert_equal(found, quantize_operands.reference(weights, [len(weights)], []))
    (largest,) = numbers_of(found[-1])
    ours = stack_weights.kernel(weights, largest, transposed)
    assert_equal(ours, stack_weights.reference(weights, largest, transposed))


@pytest.mark.kernel
@layouts
@stacks
def test_codes_of_each_weight_are_those_of_the_stack(sizes, columns, transposed):
    """Quantized one by one with the common maximum, as shards are; on a GPU the kernel moves them as they are."""
    weights = [awkward(rows, columns, seed=i) for i, rows in enumerate(sizes)]
    (largest,) = numbers_of(quantize_operands.reference(weights, [len(weights)], [])[-1])
    codes = [stack_weights.reference([w], largest, False)[0] for w in weights]
    expected, _ = stack_weights.reference(weights, largest, transposed)
    assert_equal(stack_codes.reference(codes, transposed), expected)
    assert_equal(stack_codes.kernel(codes, transposed), expected)


@pytest.mark.kernel
@pytest.mark.alternate
@layouts
@pytest.mark.parametrize("columns", [16, 336, 768])
@pytest.mark.parametrize("sizes", [[16], [256, 128, 128], [128, 128, 100], [48, 16, 16], [100, 61], [130]])
def test_block_kernel(sizes, columns, transposed):
    weights = [awkward(rows, columns, seed=i) for i, rows in enumerate(sizes)]
    ours = block_stack_weights.kernel(weights, transposed)
    assert_equal(ours, block_stack_weights.reference(weights, transposed))
