"""How kernels/gpu/block_tiles.py divides tokens among programs; what its device functions write: test_blockwise.py."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from overcoat.kernels.gpu.block_tiles import MOST_BLOCKS, ROW_TILE, row_tile, token_blocks

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


@pytest.mark.parametrize("count", [token_blocks, row_tile])
def test_too_many_tokens_are_told(count):
    with pytest.raises(ValueError, match=f"{MOST + 1} tokens at once are more than {MOST}"):
        count(MOST + 1)
