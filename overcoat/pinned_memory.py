"""Page-locked host memory, for asynchronous copies between host and GPU.

`host_buffer` returns memory that lives as long as a tensor in it; `Pool` lends buffers and reuses them, since locking
pages takes a few tenths of a second per gigabyte.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import Tensor

# Tensors in a packed buffer begin at multiples of this many bytes, so that kernels can load vectors.
ALIGNMENT = 16
CGROUP = Path("/sys/fs/cgroup")


def packed(sizes: list[int]) -> tuple[list[int], int]:
    """Return aligned offsets of consecutive byte strings of the given sizes, and the bytes of all."""
    *offsets, total = itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    return offsets, total


def bytes_free() -> int:
    """Return the bytes of host memory that can still be allocated; 0 if unknown."""
    try:
        named = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(named["MemAvailable"].split()[0]) << 10
        with contextlib.suppress(OSError, ValueError, KeyError):  # a container's limit
            most, now = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
            cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())["inactive_file"]
            free = min(free, most - now + int(cached))
    except (OSError, ValueError, KeyError):
        return 0
    return free


class _PageLocked(mmap.mmap):
    """Anonymous page-locked memory. torch's `pin_memory` rounds sizes up to powers of two, a third more on average."""

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
            torch.cuda.synchronize()  # copies may still be running
            torch.cuda.cudart().cudaHostUnregister(self.address)


def host_buffer(size: int, page_locked: bool, purpose: str, instead: str) -> Tensor:
    """Return host memory, uint8 (size,), page-locked until the last tensor in it is freed.

    RuntimeError: the system does not let this process lock so much; the message has `purpose`, and `instead`, what
    needs less.
    """
    if not page_locked or not size:
        return torch.empty(size, dtype=torch.uint8)
    memory = _PageLocked(size)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    memory.lock(buffer.data_ptr(), purpose, instead)
    return buffer


class _Bytes(ctypes.Array[ctypes.c_char]):
    """Bytes at an address; `owner` keeps them alive."""

    _type_, _length_ = ctypes.c_char, 0


def alias(tensor: Tensor) -> Tensor:
    """Return a contiguous host tensor with a storage of its own in the same memory.

    `torch.save` and safetensors take tensors of one storage for one tensor, and refuse several dtypes.
    """
    if not tensor.numel():
        return tensor
    kind: Any = type("Bytes", (_Bytes,), {"_length_": tensor.nbytes})
    memory = kind.from_address(tensor.data_ptr())
    memory.owner = tensor
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


@dataclass(eq=False)
class Buffer:
    """Host memory that a `Pool` lends: uint8 (size,), or None on the meta device.

    last_read: CUDA event after the last copy out of it, for which the next write must wait.
    """

    size: int
    memory: Optional[Tensor]
    last_read: Any = None


class Pool:
    """Buffers that are lent and returned. If all free ones are too small, one of them is replaced by a larger one.

    So there are never more buffers than were lent at once, and none is larger than the largest request.
    make: allocates memory of a number of bytes.
    """

    def __init__(self, make: Callable[[int], Optional[Tensor]]) -> None:
        self.make = make
        self.buffers: list[Buffer] = []  # all, lent or not
        self.free: list[Buffer] = []  # the borrower returns a buffer by appending it here

    @property
    def total_bytes(self) -> int:
        return sum(buffer.size for buffer in self.buffers)

    def take(self, size: int) -> Buffer:
        """Return the smallest free buffer of at least `size` bytes, or a new one."""
        buffer = min((b for b in self.free if b.size >= size), key=lambda b: b.size, default=None)
        if buffer is not None:
            self.free.remove(buffer)
            return buffer
        if self.free:
            self.buffers.remove(self.free.pop())
        buffer = Buffer(size, self.make(size))
        self.buffers.append(buffer)
        return buffer
