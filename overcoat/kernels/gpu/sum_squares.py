"""Sum of squares of many tensors on CUDA: one launch per dtype, a partial sum per program, then the sum of those.

It reads every gradient once, 2 bytes per parameter, and serves clipping and the check for inf and NaN at the same time.
The order of the sum is fixed, so the result repeats bit for bit.
"""

from __future__ import annotations

from typing import List

import torch
import triton
import triton.language as tl
from torch import Tensor

from overcoat.kernels.adamw import gradients_sum_squares
from overcoat.kernels.gpu.hardware import on_device
from overcoat.kernels.gpu.multi_tensor import TRITON_TYPE, readable, tile_table, upload

# Elements that a program reads at once, how often, its warps, and the depth of its pipeline.
TILE = 4096
SPAN = 16
WARPS = 8
STAGES = 1


@triton.jit
def _sum_squares_kernel(
    tiles, addresses, sizes, partials,
    TYPE: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """tiles int64 (programs,): tensor | number << 32; addresses, sizes int64 (T,); partials FP32 (programs,)."""
    entry = tl.load(tiles + tl.program_id(0))
    tensor = (entry & 0xFFFFFFFF).to(tl.int32)
    base = tl.load(addresses + tensor).to(tl.pointer_type(TYPE))
    size = tl.load(sizes + tensor)
    total = tl.zeros((TILE,), tl.float32)
    for span in tl.range(SPAN, num_stages=STAGES):
        offset = ((entry >> 32) * SPAN + span) * TILE + tl.arange(0, TILE)
        x = tl.load(tl.multiple_of(tl.max_contiguous(base + offset, TILE), 16), offset < size, 0.0).to(tl.float32)
        total += x * x
    tl.store(partials + tl.program_id(0), tl.sum(total))


class NormTables:
    """The tables of a list of tensors of these sizes: tiles (programs,) and sizes (T,), int64 on the device."""

    def __init__(self, sizes: List[int], device: torch.device) -> None:
        self.tiles = tile_table([-(-size // (TILE * SPAN)) for size in sizes]).to(device)
        self.sizes = torch.tensor(sizes, dtype=torch.int64).to(device)


def partial_sums(tables: NormTables, addresses: Tensor, dtype: torch.dtype) -> Tensor:
    """One FP32 sum of squares per program; addresses int64 (T,) on the device."""
    partials = torch.empty(len(tables.tiles), dtype=torch.float32, device=tables.tiles.device)
    if len(partials):
        _sum_squares_kernel[(len(partials),)](
            tables.tiles, addresses, tables.sizes, partials, TRITON_TYPE[dtype], TILE, SPAN, STAGES, num_warps=WARPS
        )
    return partials


@gradients_sum_squares.cuda
def gradients_sum_squares_triton(grads: List[Tensor]) -> Tensor:
    by_dtype: dict[torch.dtype, List[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    device = grads[0].device
    with on_device(device):
        parts = []
        for dtype, group in by_dtype.items():
            group = readable(group)
            addresses = upload([grad.data_ptr() for grad in group], device)
            parts.append(partial_sums(NormTables([grad.numel() for grad in group], device), addresses, dtype))
        return torch.cat(parts).sum()
