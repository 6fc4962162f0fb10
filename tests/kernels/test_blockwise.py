"""Block-scaled operands against their meaning, block by block, and their kernels, bit for bit."""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import FLOAT8, Quantized, decode_groups, encode_groups, quantize_tensor
from overcoat.kernels import blockwise as ops
from overcoat.kernels import weights as block_weights
from tests.exact import E4M3_DB, KEPT_DB, assert_close, combined_db
from tests.kernels.compare import DEVICE, DTYPES, INTERPRETED, assert_equal, awkward
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


def assert_by_block(x, data, scale, fmt):
    """Each 1x128 block of x is quantized on its own; of some rows."""
    for row in {*range(0, x.shape[0], 23), x.shape[0] - 1}:
        for block in range(ops.blocks(x.shape[1])):
            expected = quantize_tensor(x[row, 128 * block : 128 * (block + 1)], FLOAT8[fmt])
            assert scale[block, row] == expected.scale
            assert torch.equal(data[row, 128 * block :][: len(expected.data)].float(), expected.data.float())


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
    assert scale.shape == (ops.blocks(columns), tokens)
    assert data_t.shape == (columns, -(-tokens // 16) * 16)
    assert scale_t.shape == (ops.blocks(tokens), columns)
    assert data_t[:, tokens:].float().count_nonzero() == 0
    assert_by_block(x, data, scale, fmt)
    assert_by_block(x.t(), data_t, scale_t, fmt)


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


# ---- kernels -----------------------------------------------------------------------------------------------------

KERNEL_SHAPES = [(1, 16), (7, 100), (130, 400), (144, 256)] + ([] if INTERPRETED else [(1000, 5120), (513, 4096)])
QUANTIZERS = [ops.block_quantize, ops.block_quantize_both, ops.block_quantize_t]


@pytest.mark.kernel
@pytest.mark.alternate
@pytest.mark.parametrize("op", QUANTIZERS, ids=lambda op: op.reference.__name__)
@pytest.mark.parametrize("shape", KERNEL_SHAPES)
@pytest.mark.parametrize(("fmt", "dtype"), [*zip(["e4m3", "e5m2", "e4m3"], DTYPES)])
def test_quantize_kernels(op, shape, fmt, dtype):
    x = awkward(*shape, dtype)
    assert_equal(op.kernel(x, fmt), op.reference(x, fmt))


@pytest.mark.kernel
@pytest.mark.parametrize("op", QUANTIZERS, ids=lambda op: op.reference.__name__)
@formats
def test_extreme_blocks_in_the_kernels(op, fmt):
    """Blocks that are zero, tiny, huge or not finite: each keeps its trouble to itself, and padding stays zero."""
    x = torch.randn(150, 300, device=DEVICE)
    x[:, :128] *= 1e-38
    x[3, 140], x[140, 150] = torch.nan, torch.inf
    x[5, 256:] = 0.0
    x[6, 256:] *= 1e36
    x[:, 299] = 0.0
    ours, theirs = op.kernel(x, fmt), op.reference(x, fmt)
    assert_equal(ours, theirs)
    assert (ours[1] == 1).any()
    assert not ours[1].isfinite().all()
    if op is ops.block_quantize_t:
        assert ours[0][:, 150:].view(torch.uint8).count_nonzero() == 0


@pytest.mark.kernel
@pytest.mark.alternate
@pytest.mark.parametrize("shape", [*KERNEL_SHAPES, (200, 512)])
@pytest.mark.parametrize(
    ("code", "group_size", "affine"),
    [
        ("sqrt8", 128, "both"),
        ("e4m3", 16, "weight"),
        ("int8", 80, "both"),
        ("sqrt8", 48, "none"),
        ("sqrt8", 256, "bias"),
    ],
)
def test_requantize_kernel(shape, code, group_size, affine):
    weight = torch.randn(shape[1], device=DEVICE).bfloat16() if affine in ("weight", "both") else None
    bias = torch.randn(shape[1], device=DEVICE).bfloat16() if affine in ("bias", "both") else None
    arguments = (*encode_groups(awkward(*shape), code, group_size), weight, bias, code, group_size)
    assert_equal(ops.block_requantize_t.kernel(*arguments), ops.block_requantize_t.reference(*arguments))
