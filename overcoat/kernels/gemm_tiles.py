"""Which of cuBLASLt's kernels multiplies fastest on a GPU that is held down by its power limit.

cuBLASLt recommends, of some eight kernels, the one that is fastest on a cool GPU. In training an H200 draws its 700 W
and lowers its clock: there 192 x 192 tiles, the first choice for wide results, take 6% longer for a 7B's gate and up
than 168 x 128. All kernels that do not split K return the same bits. So the choice is by a model of the time, fitted on
hot H200s for K from 2,048 to 38,000 and 4,096 to 16,384 rows (docs/research/kernels.md):

    time = waves * area * (per_product + per_tile * 4096 / K)

waves: how often all multiprocessors get a tile, the last, unfinished round counted whole; area of a tile; K the
contracted axis. What is per tile (its epilogue) counts less the longer K is.

Legend: M rows, N columns of the result, K the contracted axis; all of row-major D = A @ B^T.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

from overcoat.kernels.launch import cdiv


class Tile(NamedTuple):
    """A kernel's tile of the result, and how many tiles of a cluster lie side by side in either direction."""

    columns: int
    rows: int
    across: int
    down: int
    per_product: float
    per_tile: float


# The shortest K that was measured.
SHORTEST = 2048
# By cuBLASLt's numbers of the tile and of the cluster's shape (cublasLtMatmulTile_t, cublasLtClusterShape_t).
TILES = {
    (24, 5): Tile(256, 128, 1, 2, 1.000, 0.000),
    (29, 3): Tile(128, 160, 2, 1, 1.018, -0.024),
    (197, 5): Tile(168, 128, 1, 2, 1.015, -0.033),
    (201, 5): Tile(176, 128, 1, 2, 0.997, -0.027),
}


def relative_time(tile: Tile, rows: int, columns: int, inner: int, processors: int) -> float:
    """Time of D (rows, columns) with this tile, in units that are the same for all tiles; inner: K."""
    across = cdiv(cdiv(columns, tile.columns), tile.across) * tile.across
    down = cdiv(cdiv(rows, tile.rows), tile.down) * tile.down
    waves = cdiv(across * down, processors)
    return waves * tile.columns * tile.rows * (tile.per_product + tile.per_tile * 4096 / inner)


def choose(offered: Sequence[tuple[int, int]], rows: int, columns: int, inner: int, processors: int) -> int:
    """The place of the fastest kernel in `offered`, (tile, cluster) in the order of cuBLASLt's recommendation.

    The first one where the result is small (less than two rounds of large tiles: tails decide there, which the model
    does not know), where K is shorter than any that was measured, and where none of `TILES` is offered.
    """
    if rows * columns < 2 * processors * 256 * 128 or inner < SHORTEST:
        return 0
    times = {
        place: relative_time(TILES[key], rows, columns, inner, processors)
        for place, key in enumerate(offered)
        if key in TILES
    }
    return min(times, key=times.__getitem__) if times else 0
