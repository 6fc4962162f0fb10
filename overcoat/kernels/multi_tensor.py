"""Many tensors in one launch: their addresses on the device, and the sum of their squares.

One table holds the tensor and tile of each program, another the tensors' addresses. Addresses are copied through pinned
memory, without synchronization.

The sum of squares reads every gradient once, for clipping and for the check for inf and NaN: a partial sum per program,
then the sum of those, in a fixed order. SPAN * LANE squares are summed in FP32 and these sums in FP64, which cannot
overflow as long as the FP32 sums are finite.

Legend: T tensors.
"""

from __future__ import annotations

import operator
from functools import reduce
from itertools import accumulate
from typing import List, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from overcoat.kernels.language import tl, triton
from overcoat.kernels.launch import kernel

# Elements of one read of a program, reads per program, reads in flight (unrolled), and warps.
TILE = 4096
SPAN = 16
UNROLL = 4
WARPS = 8
# Sums that a thread adds in FP32 before conversion to FP64, which is slow.
LANE = 8

# Partial sums that a program adds up at once.
PARTIALS = 256

TRITON_TYPE = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.int16: tl.int16,
}


def tile_table(counts: List[int]) -> Tensor:
    """Return int64 (programs,) on the CPU: tensor | tile << 32 for every tile; counts: tiles of each tensor."""
    tensor = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    first = torch.tensor([0, *counts]).cumsum(0)[:-1]
    return (torch.arange(len(tensor)) - first[tensor]) << 32 | tensor


@_disable_current_modes()  # hide its temporaries from memory counters, like a kernel's
def sum_squares(grads: List[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, 0-d FP64; inf or NaN if any element is not finite.

    Squares are FP32, as in the second moment, so the sum is also inf if an element's square overflows: from 2^64 =
    1.8e19 on. The kernel (`Gradients`) sums 128 squares in FP32 before FP64, so there possibly from 2^60 = 1.1e18 on.
    """
    total = grads[0].new_zeros((), dtype=torch.float64)  # a fake tensor if grads are
    for grad in grads:
        total += grad.float().square().sum(dtype=torch.float64)
    return total


@triton.jit
def _squares(base, offset, mask, WHOLE: tl.constexpr):
    """Return x^2 of a tile, FP32. WHOLE: no mask; a mask prevents vector loads if a size may not divide by 8."""
    pointers = tl.multiple_of(tl.max_contiguous(base + offset, offset.shape[0]), 16)
    x = tl.load(pointers, None if WHOLE else mask, None if WHOLE else 0.0).to(tl.float32)
    return x * x


@kernel
def _sum_squares_kernel(
    tiles, addresses, sizes, partials,
    TYPE: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """tiles int64 (programs,): tensor | number << 32; addresses, sizes int64 (T,); partials FP64 (programs,)."""
    # Read from the last tensor to the first: the step begins with the first, which is then still in the L2 cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    entry = tl.load(tiles + program)
    tensor = (entry & 0xFFFFFFFF).to(tl.int32)
    base = tl.load(addresses + tensor).to(tl.pointer_type(TYPE))
    size = tl.load(sizes + tensor)
    total = tl.zeros((TILE,), tl.float32)
    start, lane = (entry >> 32) * SPAN * TILE, tl.arange(0, TILE)
    if start + SPAN * TILE <= size:
        for span in tl.range(SPAN, loop_unroll_factor=UNROLL):
            total += _squares(base, start + span * TILE + lane, True, True)
    else:
        for span in tl.range(tl.cdiv(size - start, TILE).to(tl.int32)):
            offset = start + span * TILE + lane
            total += _squares(base, offset, offset < size, False)
    few = tl.sum(tl.reshape(total, (TILE // LANE, LANE)), 1)
    tl.store(partials + program, tl.sum(few.to(tl.float64)))


@kernel
def _sum_partials_kernel(partials, first, squares, flags, BLOCK: tl.constexpr):
    """Store the sum of each tensor's partials, FP64 (T,), and flags of sums that are not finite, bool (T,)."""
    tensor, lane = tl.program_id(0), tl.arange(0, BLOCK)
    begin, end = tl.load(first + tensor), tl.load(first + tensor + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    for block in tl.range(tl.cdiv(end - begin, BLOCK).to(tl.int32)):
        place = begin + block * BLOCK + lane
        total += tl.load(partials + place, place < end, 0.0)
    value = tl.sum(total)
    tl.store(squares + tensor, value)
    tl.store(flags + tensor, (value < float("inf")) == 0)  # NaN is not below anything


def is_capturing(device: torch.device) -> bool:
    """True if a CUDA graph is recording."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device without a host sync: the allocator keeps pinned memory until it has been copied."""
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class Gradients:
    """Device-side addresses of T gradients, int64 (T,), once `set` has been called; and their sums of squares.

    sizes: elements of each gradient.
    """

    def __init__(self, sizes: List[int], device: torch.device) -> None:
        self.device = device
        counts = [-(-size // (TILE * SPAN)) for size in sizes]
        self.programs = sum(counts)
        self.tiles = tile_table(counts).to(device)
        self.sizes, self.first = (torch.tensor(of).to(device) for of in (sizes, [0, *accumulate(counts)]))
        self.partials = torch.empty(self.programs, dtype=torch.float64, device=device)
        self.addresses = self.sizes
        self.dtype = torch.float32
        self._known: List[int] = []
        self._copies: List[Tensor] = []

    def set(self, grads: List[Tensor]) -> None:
        """Set the gradients, contiguous, that the next launches read; those not aligned to 16 bytes are copied.

        No Python call per tensor: a step has a thousand gradients.
        """
        addresses = list(map(Tensor.data_ptr, grads))
        self._copies = []
        if reduce(operator.or_, addresses, 0) & 15:
            self._copies = [grad.clone() if grad.data_ptr() & 15 else grad for grad in grads]
            addresses = list(map(Tensor.data_ptr, self._copies))
        self.dtype = grads[0].dtype
        if addresses != self._known:
            self._known, self.addresses = addresses, send(addresses, torch.int64, self.device)
            if is_capturing(self.device):
                self._known = []  # not on the device before a replay: send them again

    def forget_copies(self) -> None:
        """Free the copies of unaligned gradients; call it when all kernels that read them are launched."""
        self._copies = []

    def sum_squares(self) -> Tensor:
        """Return the sum of squares over all gradients, 0-d FP64."""
        return self._partial_sums().sum()

    def sums_of_squares(self) -> tuple[Tensor, Tensor]:
        """Return each gradient's sum of squares, FP64 (T,), and flags of gradients that are not finite, bool (T,)."""
        count, partials = len(self.sizes), self._partial_sums()
        squares = torch.empty(count, dtype=torch.float64, device=self.device)
        flags = torch.empty(count, dtype=torch.bool, device=self.device)
        _sum_partials_kernel[(count,)](partials, self.first, squares, flags, PARTIALS)
        return squares, flags

    def _partial_sums(self) -> Tensor:
        """Return one FP64 sum of squares per program, valid until the next call."""
        if self.programs:
            _sum_squares_kernel[(self.programs,)](
                self.tiles, self.addresses, self.sizes, self.partials,
                TRITON_TYPE[self.dtype], TILE, SPAN, UNROLL, LANE, num_warps=WARPS,
            )  # fmt: skip
        return self.partials
