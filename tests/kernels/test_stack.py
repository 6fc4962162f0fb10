"""Weights stacked into one operand, with one scale or in 128x128 blocks, and their kernels, bit for bit."""

from __future__ import annotations

import pytest
import torch

from overcoat.formats import E4M3, quantize_blocks, quantize_tensor
from overcoat.kernels.blockwise import blocks
from overcoat.kernels.weights import block_stack_weights, quantize_weights, stack_codes, stack_weights
from tests.kernels.compare import assert_equal, awkward
from tests.kernels.samples import normal

layouts = pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])


@layouts
def test_stacked_weights_share_one_scale(transposed, device):
    weights = [normal(n, 40, dtype=torch.bfloat16, seed=n).to(device) * n for n in (8, 3, 5)]
    data, scale, largest = quantize_weights(weights)
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
    *_, largest = found = quantize_weights.kernel(weights)
    assert_equal(found, quantize_weights.reference(weights))
    ours = stack_weights.kernel(weights, largest, transposed)
    assert_equal(ours, stack_weights.reference(weights, largest, transposed))


@pytest.mark.kernel
@layouts
@stacks
def test_codes_of_each_weight_are_those_of_the_stack(sizes, columns, transposed):
    """Quantized one by one with the common maximum, as shards are; on a GPU the kernel moves them as they are."""
    weights = [awkward(rows, columns, seed=i) for i, rows in enumerate(sizes)]
    *_, largest = quantize_weights.reference(weights)
    codes = [stack_weights.reference([w], largest, False)[0] for w in weights]
    expected, _ = stack_weights.reference(weights, largest, transposed)
    assert_equal(stack_codes.reference(codes, transposed), expected)
    assert_equal(stack_codes.kernel(codes, transposed), expected)


@pytest.mark.kernel
@layouts
@pytest.mark.parametrize("columns", [16, 336, 768])
@pytest.mark.parametrize("sizes", [[16], [256, 128, 128], [128, 128, 100], [48, 16, 16], [100, 61], [130]])
def test_block_kernel(sizes, columns, transposed):
    weights = [awkward(rows, columns, seed=i) for i, rows in enumerate(sizes)]
    ours = block_stack_weights.kernel(weights, transposed)
    assert_equal(ours, block_stack_weights.reference(weights, transposed))
