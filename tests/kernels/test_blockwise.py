"""Block-scaled operands against their meaning, block by block: `pytest tests/kernels/test_blockwise.py`."""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import E4M3, FLOAT8, Quantized, decode_groups, encode_groups, quantize_blocks, quantize_tensor
from overcoat.kernels import block_weights
from overcoat.kernels import blockwise as ops
from tests.exact import E4M3_DB, FLOAT8_DB, KEPT_DB, assert_close, combined_db
from tests.kernels.samples import normal

SHAPES = [(1, 24), (7, 130), (61, 256), (300, 200)]
shapes = pytest.mark.parametrize("shape", SHAPES)
formats = pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])


def decoded(data, scale):
    """FP64 values of a 1x128 operand, by indexing: element (row, k) has scale [k / 128, row]."""
    row, k = torch.arange(data.shape[0])[:, None], torch.arange(data.shape[1])[None, :]
    return data.double() * scale.double()[(k // 128).to(scale.device), row.to(scale.device)]


def decoded_weights(data, scale):
    """FP64 values of a 128x128 operand: element (row, k) has scale [row / 128, k / 128]."""
    row, k = torch.arange(data.shape[0])[:, None], torch.arange(data.shape[1])[None, :]
    return data.double() * scale.double()[(row // 128).to(scale.device), (k // 128).to(scale.device)]


@shapes
@formats
def test_each_block_is_quantized_on_its_own(shape, fmt, device):
    x = normal(*shape, dtype=torch.bfloat16).to(device)
    data, scale = ops.block_quantize(x, fmt)
    assert scale.shape == (ops.blocks(shape[1]), shape[0])
    for row in {0, shape[0] // 2, shape[0] - 1}:
        for block in range(ops.blocks(shape[1])):
            part = slice(128 * block, 128 * (block + 1))
            expected = quantize_tensor(x[row, part], FLOAT8[fmt])
            assert scale[block, row] == expected.scale
            assert torch.equal(data[row, part].float(), expected.data.float())


@shapes
@formats
def test_both_layouts_have_scales_of_their_own(shape, fmt, device):
    x = normal(*shape, dtype=torch.bfloat16).to(device)
    data, scale, data_t, scale_t = ops.block_quantize_both(x, fmt)
    for ours, plain in zip(
        (data, scale, data_t, scale_t), (*ops.block_quantize(x, fmt), *ops.block_quantize_t(x, fmt))
    ):
        assert torch.equal(ours.float(), plain.float())
    tokens, columns = shape
    assert data_t.shape == (columns, -(-tokens // 16) * 16)
    assert scale_t.shape == (ops.blocks(tokens), columns)
    assert data_t[:, tokens:].float().count_nonzero() == 0
    for i in range(0, columns, 23):
        for block in range(ops.blocks(tokens)):
            expected = quantize_tensor(x[128 * block : 128 * (block + 1), i], FLOAT8[fmt])
            assert scale_t[block, i] == expected.scale
            assert torch.equal(data_t[i, 128 * block :][: len(expected.data)].float(), expected.data.float())
    assert_close("x", x, decoded(data, scale), FLOAT8_DB[fmt])
    assert_close("x^T", x.t(), decoded(data_t, scale_t)[:, :tokens], FLOAT8_DB[fmt])


def test_an_outlier_costs_its_own_block_alone(device):
    """1e6 beside normal values: with one scale for the tensor E4M3 rounds nearly all of them to zero."""
    x = normal(256, 512).to(device)
    x[100, 200] = 1e6
    others = torch.ones_like(x, dtype=torch.bool)
    others[100, 128:256] = False
    for values, truth in (
        (decoded(*ops.block_quantize(x, "e4m3")), x),
        (decoded(*ops.block_quantize_t(x, "e4m3")).t(), x),
        (decoded_weights(*block_weights.block_stack_weights([x], False)), x),
    ):
        far = others.clone()
        far[:128, 128:256] = False  # also leaves out the outlier's column and its 128x128 block
        assert_close("far from the outlier", truth[far], values[far], E4M3_DB)
    data, scale = quantize_tensor(x)
    assert (data.float() * scale)[others].count_nonzero() < 0.1 * others.sum()


def test_zero_blocks_and_non_finite_ones_keep_to_themselves(device):
    x = normal(20, 384).to(device)
    x[3, 128:256] = 0.0
    x[5, 300], x[6, 10] = torch.nan, torch.inf
    data, scale, data_t, scale_t = ops.block_quantize_both(x, "e4m3")
    assert scale[1, 3] == 1.0
    assert scale.isfinite().logical_not().nonzero().tolist() == [[0, 6], [2, 5]]
    assert scale_t.isfinite().logical_not().nonzero().tolist() == [[0, 10], [0, 300]]
    assert data_t[:, 20:].float().count_nonzero() == 0
    assert not (data.float()[6, :128] * scale[0, 6]).isfinite().any()
    assert not (data_t.float()[300, :20] * scale_t[0, 300]).isfinite().any()


@pytest.mark.parametrize("code", list(KEPT_DB))
@pytest.mark.parametrize("affine", ["neither", "weight", "bias", "both"])
def test_requantize_rebuilds_the_operand(code, affine, device):
    """decode * weight + bias in blocks along the tokens; a bias does not reach the padding."""
    x = normal(150, 200).to(device)
    weight = (1 + 0.3 * normal(200, seed=1)).to(device) if affine in ("weight", "both") else None
    bias = (0.5 * normal(200, seed=2)).to(device) if affine in ("bias", "both") else None
    kept = encode_groups(x, code, 128)
    data, scale = ops.block_requantize_t(*kept, weight, bias, code, 128)
    y = decode_groups(Quantized(*kept), code, 128)
    y = (y if weight is None else y * weight) + (0 if bias is None else bias)
    expected = ops.block_quantize_t(y, "e4m3")
    assert torch.equal(data.float(), expected[0].float())
    assert torch.equal(scale, expected[1])
    truth = (x if weight is None else x * weight) + (0 if bias is None else bias)
    assert_close("y^T", truth.t(), decoded(data, scale)[:, :150], combined_db(E4M3_DB, KEPT_DB[code]))


@pytest.mark.parametrize("sizes", [(128, 256), (128, 100), (40, 30, 70), (130,)])
@pytest.mark.parametrize("columns", [24, 640])
def test_stacked_weights(sizes, columns, device):
    """One matrix whose blocks may span two weights; its transpose holds the same numbers, scales included."""
    weights = [(10.0**i * normal(n, columns, seed=n)).to(device, torch.bfloat16) for i, n in enumerate(sizes)]
    stacked = torch.cat(weights)
    data, scale = block_weights.block_stack_weights(weights, False)
    expected = quantize_blocks(stacked, (128, 128), E4M3)
    rows, width = ops.blocks(stacked.shape[0]), ops.blocks(columns)
    assert scale.shape == (rows, -(-width // 4) * 4)
    assert torch.equal(data.float(), expected.data.float())
    assert torch.equal(scale[:, :width], expected.scale)
    assert scale[:, width:].count_nonzero() == 0
    data_t, scale_t = block_weights.block_stack_weights(weights, True)
    assert scale_t.shape == (width, -(-rows // 4) * 4)
    assert torch.equal(data_t.t().float(), data.float())
    assert torch.equal(scale_t[:, :rows].t(), scale[:, :width])
    assert scale_t[:, rows:].count_nonzero() == 0
