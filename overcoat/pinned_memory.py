"""Page-locked host memory, for asynchronous copies between host and GPU.

`host_buffer` returns memory that lives as long as a tensor in it; `Pool` lends buffers and reuses them, since locking
pages takes a few tenths of a second per gigabyte. The driver would make the pages one after the other: threads on the
GPU's NUMA node make them before.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import Tensor

# Tensors in a packed buffer begin at multiples of this many bytes, so that kernels can load vectors.
ALIGNMENT = 16
PROC, SYS = Path("/proc"), Path("/sys")
# Files of a group of processes: its limit and its use of memory, and in memory.stat how much of that can be dropped.
CGROUP = "memory.max", "memory.current", "inactive_file"
CGROUP_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
# Bytes of pages that a thread makes at a time, and the most threads.
PART, THREADS = 64 * 2**20, 16


def packed(sizes: list[int]) -> tuple[list[int], int]:
    """Return aligned offsets of consecutive byte strings of the given sizes, and the bytes of all."""
    *offsets, total = itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    return offsets, total


def bytes_free() -> int:
    """Return the bytes of host memory that can still be allocated, within the limits of containers, batch jobs and
    services; 0 if unknown."""
    try:
        named = dict(line.split(":") for line in (PROC / "meminfo").read_text().splitlines())
        free = int(named["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError):
        return 0
    return max(1, min([free, *_left_in_groups()]))


def _left_in_groups() -> Iterator[int]:
    """Yield the bytes that control groups leave to this process: its own and those around it, of cgroup v1 or v2."""
    try:
        lines = [line.split(":", 2) for line in (PROC / "self/cgroup").read_text().splitlines()]
    except OSError:
        lines = []
    groups = [(SYS / "fs/cgroup", path, CGROUP) for _, kinds, path in lines if not kinds]
    groups += [(SYS / "fs/cgroup/memory", path, CGROUP_V1) for _, kinds, path in lines if "memory" in kinds.split(",")]
    for root, path, (limit, usage, droppable) in groups:
        # In a container the path may be the host's, and the root its own group.
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError, KeyError):  # no such folder, or "max"
                most, now = (int((folder / name).read_text()) for name in (limit, usage))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield most - now + int(stat[droppable])
            if folder == root:
                break


def cpus_near_gpu() -> set[int]:
    """Return the CPUs of the current GPU's NUMA node that this process may run on; if that is unknown all of them."""
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    allowed = os.sched_getaffinity(0)
    if not torch.cuda.is_available():
        return allowed
    with contextlib.suppress(OSError, ValueError, AttributeError):  # node -1, or PyTorch does not say where the GPU is
        of: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        place = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
        node = int((SYS / "bus/pci/devices" / place / "numa_node").read_text())
        listed = (SYS / f"devices/system/node/node{node}/cpulist").read_text().strip()
        ends = [[int(end) for end in part.split("-")] for part in listed.split(",")]
        return {cpu for first, *last in ends for cpu in range(first, (last or [first])[0] + 1)} & allowed or allowed
    return allowed


def _make_pages(address: int, size: int) -> None:
    """Write to all pages of new memory, in several threads: Linux places a page on the node of who writes first."""
    cpus = cpus_near_gpu()

    def write(start: int) -> None:
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)  # of this thread
        ctypes.memset(address + start, 0, min(PART, size - start))  # without the interpreter's lock

    with ThreadPoolExecutor(min(THREADS, len(cpus))) as threads:
        list(threads.map(write, range(0, size, PART)))


def _locked_limit() -> str:
    """Return `ulimit -l`, for messages. NVIDIA's Linux driver does not ask for it (get_user_pages), others may."""
    try:
        import resource
    except ImportError:  # Windows
        return ""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return f" (ulimit -l: {'unlimited' if limit == resource.RLIM_INFINITY else f'{limit >> 10} KiB'})"


class _PageLocked(mmap.mmap):
    """Anonymous page-locked memory. torch's `pin_memory` rounds sizes up to powers of two, a third more on average.

    Shared between processes, as is mmap's default: after a fork the first write to a private page would move it away
    from where the GPU reads.
    """

    address = 0

    def __new__(cls, size: int) -> _PageLocked:
        return super().__new__(cls, -1, size)

    def lock(self, address: int, purpose: str, instead: str) -> None:
        if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer pages to make and to lock, where shmem_enabled says "advise"
            with contextlib.suppress(OSError):
                self.madvise(mmap.MADV_HUGEPAGE)
        _make_pages(address, len(self))
        error = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 1))  # portable: for all GPUs
        if error:
            if torch.cuda.is_available():  # CUDA keeps the error, and blames whoever launches a kernel next
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")
            raise RuntimeError(
                f"offload: CUDA error {error} while page-locking {len(self)} bytes of host memory for {purpose}, with "
                f"{bytes_free()} bytes free{_locked_limit()}; free host memory, raise the limit, or use {instead}"
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
