"""Page-locked host memory, for copies between host and GPU that neither waits for.

`host_buffer` gives memory for as long as a tensor in it lives; `Pool` lends buffers that are used again and again,
since locking pages takes some tenths of a second per gigabyte.
"""

from __future__ import annotations

import itertools
import mmap
import sys
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch
from torch import Tensor

# Tensors of a packed buffer begin at multiples of this many bytes: kernels load vectors.
ALIGNMENT = 16


def packed(sizes: list[int]) -> tuple[list[int], int]:
    """Offsets of byte strings one after the other, aligned, and the bytes of all."""
    *offsets, total = itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    return offsets, total


class _PageLocked(mmap.mmap):
    """Anonymous memory, locked for copies that the host does not wait for. torch's own `pin_memory` rounds up to powers
    of two, which would cost a third more on average."""

    address = 0

    def __new__(cls, size: int) -> _PageLocked:
        return super().__new__(cls, -1, size)

    def lock(self, address: int, purpose: str, instead: str) -> None:
        error = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 1))  # portable: for all GPUs
        if error:
            raise RuntimeError(
                f"offload: CUDA error {error} while page-locking {len(self)} bytes of host memory for {purpose}; free "
                f"host memory, raise the container's limit, or use {instead}"
            )
        self.address = address

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.synchronize()  # copies may still be on their way
            torch.cuda.cudart().cudaHostUnregister(self.address)


def host_buffer(size: int, page_locked: bool, purpose: str, instead: str) -> Tensor:
    """uint8 (size,); it is unlocked when the last tensor that lies in it goes. RuntimeError: the system does not let
    this process lock so much; it names the purpose, and what needs no such memory (instead)."""
    if not page_locked or not size:
        return torch.empty(size, dtype=torch.uint8)
    memory = _PageLocked(size)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    memory.lock(buffer.data_ptr(), purpose, instead)
    return buffer


@dataclass(eq=False)
class Buffer:
    """Host memory, uint8 (size,), that a `Pool` lends; None where nothing is computed (the meta device). last_read:
    CUDA event after the last copy out of it, for whoever writes into it next."""

    size: int
    memory: Optional[Tensor]
    last_read: Any = None


class Pool:
    """Buffers that are lent and given back. A buffer too small for what is asked makes room for one that is not, so
    there are never more than were lent at once, each as large as the largest request. make: bytes -> memory."""

    def __init__(self, make: Callable[[int], Optional[Tensor]]) -> None:
        self.make = make
        self.buffers: list[Buffer] = []  # all, lent or not
        self.free: list[Buffer] = []  # what is given back is appended here

    @property
    def total_bytes(self) -> int:
        return sum(buffer.size for buffer in self.buffers)

    def take(self, size: int) -> Buffer:
        """A buffer of at least `size` bytes, the smallest there is."""
        buffer = min((b for b in self.free if b.size >= size), key=lambda b: b.size, default=None)
        if buffer is not None:
            self.free.remove(buffer)
            return buffer
        if self.free:
            self.buffers.remove(self.free.pop())
        buffer = Buffer(size, self.make(size))
        self.buffers.append(buffer)
        return buffer
