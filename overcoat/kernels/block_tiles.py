"""Tiles whose blocks of 128 are scaled, written: what the kernels with 1x128 scales have in common.

A tile's 128 columns and / or 128 tokens are whole blocks, so a program finds its blocks' maxima in registers. A tile is
(tokens, NG, GP): its columns are NG groups of kept codes, or one group of 128. What is written transposed goes as words
of four neighbouring tokens (tiles.py), in tiles that are four.

To put maxima (or sums) along the tokens together, threads exchange a number for each column that they hold, and warps
do the same through shared memory, where a column's numbers lie side by side: columns that are apart by 32 or more
such numbers are in one bank. With 16 bytes of a row a thread, as Triton has it by itself, and 8 warps shared memory was
62 to 92% busy (Nsight Compute), with that for a good part. So a strip says how many columns a thread holds, has few
warps, and finds the maxima of its results in one reduction.

Legend: that of blockwise.py.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from overcoat.kernels.device import larger, max_magnitude, power_of_2, scale_of, to_float8
from overcoat.kernels.instructions import reciprocal
from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import cdiv
from overcoat.kernels.tiles import group_columns

BLOCK = 128
# Tokens of a tile whose rows alone are scaled.
ROW_TILE = 16


class Strip(NamedTuple):
    """A tile of 128 tokens whose columns alone are scaled."""

    columns: int
    vector: int  # neighbouring columns of a thread
    warps: int
    registers: Optional[int]  # the most of a thread; None: as many as the compiler wants


# CUDA's limit for the second axis of a grid, where the tokens are: to take all from one cost up to 12% of the time.
MOST_BLOCKS = 65535


def token_blocks(tokens: int) -> int:
    """How many blocks of 128 cover the tokens. ValueError: more than a grid has room for."""
    count = cdiv(tokens, BLOCK)
    if count > MOST_BLOCKS:
        raise ValueError(f"{tokens} tokens at once are more than {MOST_BLOCKS * BLOCK}: split the batch")
    return count


def row_tile(tokens: int) -> int:
    """Tokens of a program whose rows alone are scaled, a power of 2: few, as long as the grid has room for all.
    ValueError: more tokens than `token_blocks` takes."""
    return max(ROW_TILE, power_of_2(cdiv(token_blocks(tokens) * BLOCK, MOST_BLOCKS)))


@triton.jit
def store_rows(x, t, rows, out_ptr, scale_ptr, offsets, inside, INVERSE_MAX: tl.constexpr):
    """Rows t of x (BT, NG, GP), zero outside, one block each: x / scale in FP8 at `offsets`, and the scales."""
    scale = scale_of(max_magnitude(max_magnitude(x, 2), 1), INVERSE_MAX)
    tl.store(scale_ptr + t, scale, mask=t < rows)
    x = x * reciprocal(scale)[:, None, None]
    tl.store(out_ptr + offsets, to_float8(x, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def strip_columns(number, C, G: tl.constexpr, GP: tl.constexpr, W: tl.constexpr, V: tl.constexpr):
    """The strip `number` of W columns: its first column c0; columns from there on (NG, WG), none of two groups; their
    groups' numbers (NG,); which columns are real. A strip is part of a group or several; whole ones if G is no power
    of 2, then of GP columns each."""
    if G == GP:
        NG: tl.constexpr = (W + G - 1) // G
        WG: tl.constexpr = W // NG
        first, c0, i = tl.arange(0, NG) * WG, number * W, tl.arange(0, WG)
        # Of this the compiler sees that V columns follow each other, not all.
        c = first[:, None] + (i // V * V + i % V)[None, :]
        return c0, c, (c0 + first) // G, c < C - c0
    else:
        g0 = number * (W // GP)
        g, c, real = group_columns(g0, C, G, GP, W // GP)
        return g0 * G, c, g0 + g, real


@triton.jit
def quad_magnitude(x0, x1, x2, x3):
    """The largest |x| of four rows, element by element."""
    return larger(larger(tl.abs(x0), tl.abs(x1)), larger(tl.abs(x2), tl.abs(x3)))


@triton.jit
def store_scales(amax, scale_t_ptr, c, real, INVERSE_MAX: tl.constexpr):
    """Columns' scales (NG, GP) from their maxima, stored; returns what the columns are multiplied by, (1, NG, GP)."""
    scale = scale_of(amax, INVERSE_MAX)
    tl.store(scale_t_ptr + c, scale, mask=real)
    return reciprocal(scale)[None, :, :]


@triton.jit
def store_values(x, inside, pointers, stride):
    """Rows t to t + 3 as they are, in the pointers' type."""
    TYPE: tl.constexpr = pointers.dtype.element_ty
    tl.store(pointers, x[0].to(TYPE), mask=inside[0])
    tl.store(pointers + stride, x[1].to(TYPE), mask=inside[1])
    tl.store(pointers + 2 * stride, x[2].to(TYPE), mask=inside[2])
    tl.store(pointers + 3 * stride, x[3].to(TYPE), mask=inside[3])
