"""How kernels/block_tiles.py divides tokens among programs; what its device functions write: test_blockwise.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from overcoat.kernels import activation, block_tiles, blockwise
from overcoat.kernels.block_tiles import MOST_BLOCKS, ROW_TILE, row_tile, token_blocks
from tests.kernels.compare import DEVICE, NEEDS_GPU

MOST = MOST_BLOCKS * 128


@pytest.mark.parametrize("tokens", [0, 1, 128, 129, 1_000_000, 1_048_577, 5_000_000, MOST])
def test_a_grid_has_room_for_all_tokens(tokens):
    assert token_blocks(tokens) == -(-tokens // 128) <= 65535
    rows = row_tile(tokens)
    assert rows >= ROW_TILE
    assert rows & (rows - 1) == 0
    assert -(-tokens // rows) <= 65535


def test_few_rows_a_program_where_there_is_room():
    assert row_tile(8192) == row_tile(1_000_000) == ROW_TILE


def _by_rows():
    """What the kernels make whose programs have `row_tile` tokens, of a number that no tile divides."""
    torch.manual_seed(0)
    x = torch.randn(130, 384, device=DEVICE).bfloat16()
    quantize = activation.activation_block_quantize.kernel
    return (
        *blockwise.block_quantize.kernel(x, "e4m3"),
        *quantize(x, "gelu_tanh", False, "sqrt8", 128),
        *quantize(x, "silu", True, "sqrt8", 64),
    )


@pytest.mark.parametrize("rows", [pytest.param(64, marks=NEEDS_GPU)])
def test_taller_tiles_write_the_same(rows, monkeypatch):
    """Tiles as tall as more than a million tokens want them."""
    expected = _by_rows()
    monkeypatch.setattr(block_tiles, "ROW_TILE", rows)
    for ours, theirs in zip(_by_rows(), expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("count", [token_blocks, row_tile])
def test_too_many_tokens_are_told(count):
    with pytest.raises(ValueError, match=f"{MOST + 1} tokens at once are more than {MOST}"):
        count(MOST + 1)
