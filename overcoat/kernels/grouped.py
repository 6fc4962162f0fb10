"""GEMMs of experts: each token's row meets the weights of the experts that its router chose.

Pairs of a token and an expert lie in *slots*, sorted by expert. An expert's slots fill whole tiles of `rows` slots, so
that a tile has one expert and a sum over an expert's slots is a sum over tiles; slots that are left over hold zeros.
The number of slots of an expert is known on the device alone (`route`): no op reads it on the host.

    grouped_gemm     out[s] = a[row of s] . b[expert of s]^T          forward and dgrad; rows of a are gathered here
    grouped_wgrad    out[e] = sum over the slots s of e of a[:, s] b[:, s]^T

Both take FP8 with the contraction axis contiguous, one scale for all rows and one for each expert.

Legend: T tokens, k experts per token, E experts, S slots, N rows of an expert's weight, K its columns.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from overcoat.formats import decode_float8
from overcoat.kernels.gemm import has_float8_tensor_cores
from overcoat.kernels.language import INTERPRETED, tl, triton
from overcoat.kernels.launch import cdiv, dense
from overcoat.kernels.op import op

# Slots of a tile: few where experts have few tokens.
FEW, MANY = 64, 128


def tile_rows(pairs: int, experts: int) -> int:
    """Return how many slots a tile has, for so many pairs of a token and an expert."""
    return MANY if pairs >= MANY * experts else FEW


def tile_count(pairs: int, experts: int, rows: int) -> int:
    """Return the most tiles that so many pairs can fill: the last tile of each expert may hold a single one."""
    return (pairs + min(pairs, experts) * (rows - 1)) // rows


def pair_count(tiles: int, experts: int, rows: int) -> int:
    """Return the pairs of so many tiles (`tile_count`): exact for fewer than `experts`, and for multiples of `rows`."""
    return tiles if tiles < experts else (tiles - experts + cdiv(experts, rows)) * rows


class Routing(NamedTuple):
    """Slots of the pairs of tokens and experts: the results of `route`.

    slots: (T, k) int32, the slot of each pair. tokens: (S,) int32, the token of each slot, -1: none.
    experts: (S / rows,) int32, the expert of each tile, E: none. bounds: (E + 1,) int32, each expert's first tile.
    """

    slots: Tensor
    tokens: Tensor
    experts: Tensor
    bounds: Tensor

    @property
    def rows(self) -> int:
        """Return how many slots a tile has."""
        return self.tokens.shape[0] // max(self.experts.shape[0], 1)


@op
def route(index: Tensor, experts: int, rows: int) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Routing` for index (T, k), experts from 0 to `experts` - 1, in tiles of `rows` slots."""
    tokens, chosen = index.shape
    ids, order = index.flatten().sort(stable=True)
    device, pairs = index.device, tokens * chosen
    number = torch.arange(experts + 1, device=device, dtype=ids.dtype)
    first = torch.searchsorted(ids, number)  # of each expert's sorted pairs
    bounds = torch.zeros(experts + 1, dtype=torch.int64, device=device)
    bounds[1:] = ((first[1:] - first[:-1] + rows - 1) // rows).cumsum(0)
    tiles = tile_count(pairs, experts, rows)
    slot = bounds[ids] * rows + torch.arange(pairs, device=device) - first[ids]
    slots = torch.empty(pairs, dtype=torch.int32, device=device)
    slots[order] = slot.int()
    owner = torch.full((tiles * rows,), -1, dtype=torch.int32, device=device)
    owner[slot] = (order // chosen).int()
    of_tile = torch.searchsorted(bounds[1:], torch.arange(tiles, device=device), right=True)
    return slots.view(tokens, chosen), owner, of_tile.int(), bounds.int()


@route.fake
def _(index, experts, rows):
    tiles = tile_count(index.numel(), experts, rows)
    sizes = index.shape, (tiles * rows,), (tiles,), (experts + 1,)
    return tuple(index.new_empty(size, dtype=torch.int32) for size in sizes)


# ---- forward and dgrad -----------------------------------------------------------------------------------------------


@op
def grouped_gemm(
    a: Tensor, rows: Optional[Tensor], b: Tensor, experts: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return (S, N) of `dtype`: row s is (row of a . b[expert]^T) * scale_a * scale_b[expert]; zeros without an expert.

    Args:
        a: (R, K) FP8. rows: (S,) int32, the row of each slot, -1: zeros; None: R = S, row s.
        b: (E, N, K) FP8. experts: (tiles,) int32, the expert of each tile of S / tiles slots; E: none.
        scale_a: 0-d FP32, or (R,), one for each row of a. scale_b: (E,) FP32.

    The tensor cores add with their 14-bit accumulators, as the dense forward and dgrad do.
    """
    tiles, wide = experts.shape[0], decode_float8(a)
    scale = scale_a.expand(wide.shape[0])[:, None]
    if rows is not None:
        token = rows.clamp(min=0).long()
        wide, scale = torch.where(rows[:, None] >= 0, wide[token], 0.0), scale[token]
    out = wide.new_zeros(wide.shape[0], b.shape[1])
    for e in range(b.shape[0]):
        here = (experts == e).repeat_interleave(wide.shape[0] // max(tiles, 1))
        out[here] = (wide[here] @ decode_float8(b[e]).t()) * (scale[here] * scale_b[e])
    return out.to(dtype)


@grouped_gemm.fake
def _(a, rows, b, experts, scale_a, scale_b, dtype):
    return a.new_empty(a.shape[0] if rows is None else rows.shape[0], b.shape[1], dtype=dtype)


@triton.jit
def _tile_of(pid, down, across, GROUP: tl.constexpr):
    """Return (row, column) of a program's tile: GROUP rows of tiles at a time, so that both operands stay in L2."""
    width = GROUP * across
    first = pid // width * GROUP
    size = tl.minimum(down - first, GROUP)
    within = pid % width
    return first + within % size, within // size


@triton.jit
def _grouped_gemm_kernel(
    a_desc,  # (S, K) FP8 in blocks (BM, BK), unless GATHER
    b_desc,  # (E N, K) FP8 in blocks (BN, BK)
    a_ptr,  # (R, K) FP8, if GATHER
    rows_ptr,  # (S,) int32, if GATHER
    experts_ptr,  # (tiles,) int32
    scale_a_ptr,  # 0-d FP32; (R,) if SCALES
    scale_b_ptr,  # (E,) FP32
    out_ptr,  # (S, N)
    tiles, E, N, K, GATHER: tl.constexpr, SCALES: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    m, n0 = _tile_of(tl.program_id(0), tiles, tl.cdiv(N, BN), GROUP)
    slot, n, k = m * BM + tl.arange(0, BM), n0 * BN + tl.arange(0, BN), tl.arange(0, BK)
    expert = tl.load(experts_ptr + m)
    acc = tl.zeros((BM, BN), tl.float32)
    here = slot >= 0
    if expert < E:
        row = slot
        if GATHER:
            row = tl.load(rows_ptr + slot)
            here = row >= 0
            row = tl.maximum(row, 0)
            rows = a_ptr + (row.to(tl.int64)[:, None] * K + k[None, :])
        for k0 in range(0, K, BK):
            if not GATHER:
                a = a_desc.load([m * BM, k0])
            elif EVEN:
                a = tl.load(rows + k0)
            else:
                a = tl.load(rows + k0, mask=(k < K - k0)[None, :], other=0.0)
            # Rows of the next expert, beyond N, are not stored; columns beyond K are zeros.
            b = b_desc.load([expert * N + n0 * BN, k0])
            acc = tl.dot(a, b.T, acc)
        if SCALES:
            acc = acc * (tl.load(scale_a_ptr + row) * tl.load(scale_b_ptr + expert))[:, None]
        else:
            acc = acc * (tl.load(scale_a_ptr) * tl.load(scale_b_ptr + expert))
    out = tl.where(here[:, None], acc, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (slot.to(tl.int64)[:, None] * N + n[None, :]), out, mask=(n < N)[None, :])


# (columns, warps) of a tile where K is large, and where it is small: then stores count, and small tiles overlap them.
LARGE_K, WIDE, NARROW = 1024, (256, 8), (128, 4)
_BK, _GROUP, STAGES = 128, 8, 3
ALIGNED = 16  # bytes of a row, as the copy engine needs


def _runs_here(*operands: Tensor) -> bool:
    """True if the kernels take these operands: on GPUs with FP8 tensor cores, rows of whole 16 bytes."""
    fits = all(x.shape[-1] % ALIGNED == 0 and x.numel() for x in operands)
    return fits and (bool(INTERPRETED.value) or has_float8_tensor_cores(operands[0].device))


def _described(x: Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor of x (..., C) as a matrix of rows, read in blocks by the copy engine (TMA)."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x.reshape(-1, x.shape[-1]), [rows, columns])


@grouped_gemm.cuda
def _(a, rows, b, experts, scale_a, scale_b, dtype):
    a, rows, b, experts, scale_a, scale_b = dense(a, rows, b, experts, scale_a, scale_b)
    tiles = experts.shape[0]
    if not _runs_here(a, b) or not tiles:
        return grouped_gemm.reference(a, rows, b, experts, scale_a, scale_b, dtype)
    count, (columns, depth) = a.shape[0] if rows is None else rows.shape[0], b.shape[1:]
    out, height = a.new_empty(count, columns, dtype=dtype), count // tiles
    width, warps = WIDE if depth >= LARGE_K and height == MANY else NARROW
    weights = _described(b, width, _BK)
    with torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext():
        _grouped_gemm_kernel[(tiles * cdiv(columns, width),)](
            weights if rows is not None else _described(a, height, _BK), weights, a, experts if rows is None else rows,
            experts, scale_a, scale_b, out, tiles, b.shape[0], columns, depth, rows is not None,
            scale_a.dim() == 1, depth % _BK == 0, height, width, _BK, _GROUP, num_warps=warps, num_stages=STAGES,
        )  # fmt: skip
    return out


# ---- wgrad -----------------------------------------------------------------------------------------------------------


@op
def grouped_wgrad(
    a: Tensor, b: Tensor, bounds: Tensor, rows: int, scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return (E, M, N) of `dtype`: a[:, s] b[:, s]^T * scale, summed over each expert's slots s; zeros without any.

    Args:
        a: (M, S) FP8, b: (N, S) FP8; slots that hold no pair are 0 in one of them, and finite in the other.
        bounds: (E + 1,) int32, each expert's first tile of `rows` slots.
        scale: 0-d FP32, the product of both operands'. fast: as in `gemm`.
    """
    wide_a, wide_b, first = decode_float8(a), decode_float8(b), (bounds * rows).tolist()
    sums = [wide_a[:, i:j] @ wide_b[:, i:j].t() for i, j in itertools.pairwise(first)]
    return (torch.stack(sums) * scale).to(dtype)


@grouped_wgrad.fake
def _(a, b, bounds, rows, scale, dtype, fast):
    return a.new_empty(bounds.shape[0] - 1, a.shape[0], b.shape[0], dtype=dtype)


@triton.jit
def _grouped_wgrad_kernel(
    a_desc,  # (M, S) FP8 in blocks (BM, BK)
    b_desc,  # (N, S) FP8 in blocks (BN, BK)
    bounds_ptr,  # (E + 1,) int32
    scale_ptr,  # 0-d FP32
    out_ptr,  # (E, M, N)
    M, N, IMPRECISE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    expert, down, across = tl.program_id(1), tl.cdiv(M, BM), tl.cdiv(N, BN)
    m0, n0 = _tile_of(tl.program_id(0), down, across, GROUP)
    m, n = m0 * BM + tl.arange(0, BM), n0 * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for tile in range(tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)):
        a, b = a_desc.load([m0 * BM, tile * BK]), b_desc.load([n0 * BN, tile * BK])
        acc = tl.dot(a, b.T, acc, max_num_imprecise_acc=IMPRECISE)
    out = (acc * tl.load(scale_ptr)).to(out_ptr.dtype.element_ty)
    out_ptr += expert.to(tl.int64) * M * N
    tl.store(out_ptr + (m.to(tl.int64)[:, None] * N + n[None, :]), out, mask=(m < M)[:, None] & (n < N)[None, :])


@grouped_wgrad.cuda
def _(a, b, bounds, rows, scale, dtype, fast):
    a, b, bounds = dense(a, b, bounds)
    m, n = a.shape[0], b.shape[0]
    if not _runs_here(a, b):
        return grouped_wgrad.reference(a, b, bounds, rows, scale, dtype, fast)
    out, (width, warps) = a.new_empty(bounds.shape[0] - 1, m, n, dtype=dtype), WIDE
    with torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext():
        _grouped_wgrad_kernel[(cdiv(m, MANY) * cdiv(n, width), out.shape[0])](
            _described(a, MANY, rows), _described(b, width, rows), bounds, scale, out, m, n, None if fast else rows,
            MANY, width, rows, _GROUP, num_warps=warps, num_stages=STAGES,
        )  # fmt: skip
    return out
