"""The choice among cuBLASLt's kernels: `pytest tests/kernels/test_gemm_tiles.py`."""

from __future__ import annotations

import pytest

from overcoat.kernels.gemm_tiles import SHORTEST, TILES, choose, relative_time

LARGE, TALL, NARROW, ODD = (24, 5), (29, 3), (197, 5), (201, 5)
SQUARE = (209, 3)  # 192 x 192 with clusters of 2 x 1, not in the table
SMS = 132


def time(key: tuple[int, int], *size: int) -> float:
    return relative_time(TILES[key], *size, SMS)


def test_waves_are_counted_whole_and_clusters_are_not_torn():
    # 16 x 64 tiles of 256 x 128 are 7.76 rounds on 132 multiprocessors.
    assert time(LARGE, 8192, 4096, 4096) == 8 * 256 * 128
    # One row more: 65 tiles down, 66 in pairs; 16 * 66 = 8 * 132 just fit.
    assert time(LARGE, 8193, 4096, 4096) == 8 * 256 * 128
    assert time(LARGE, 8193, 4097, 4096) == 9 * 256 * 128


@pytest.mark.parametrize(
    ("size", "fastest"),
    [
        # The products of Llama-2-7B at 4 x 2048 tokens, as measured on a hot H200 (results/gemm.jsonl).
        ((8192, 12288, 4096), {ODD}),
        ((8192, 22016, 4096), {ODD, NARROW}),
        ((8192, 11008, 4096), {ODD, NARROW}),
        ((8192, 4096, 11008), {LARGE}),
        ((8192, 4096, 22016), {LARGE}),
        # At 4 x 4096 a round of 256 x 128 tiles would be half empty.
        ((16384, 4096, 4096), {TALL}),
    ],
)
def test_the_measured_choice(size, fastest):
    offered = [SQUARE, LARGE, TALL, NARROW, ODD]
    assert offered[choose(offered, *size, SMS)] in fastest


def test_the_librarys_choice_where_nothing_is_known():
    """Few tiles: what the model leaves out decides. Short K: (197, 5) would take less than no time at K = 128."""
    size = 8192, 12288, 4096
    assert choose([SQUARE, (248, 5)], *size, SMS) == 0
    assert choose([SQUARE, ODD], *size, SMS) == 1
    assert choose([SQUARE, ODD], 64, 12288, 4096, SMS) == 0
    assert choose([LARGE, NARROW], 22016, 4096, SHORTEST - 16, SMS) == 0
    assert choose([SQUARE, ODD], 22016, 4096, SHORTEST, SMS) == 1
    assert all(time(key, 22016, 4096, SHORTEST) > 0 for key in TILES)
