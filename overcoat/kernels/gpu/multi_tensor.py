"""What kernels over many tensors at once share: types, tables of tiles, addresses on the device.

One launch covers a list of tensors. A table says which tile of which tensor a program owns, another where the tensors
lie. Addresses that change from step to step travel through pinned memory, without synchronization.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import List

import torch
import triton.language as tl
from torch import Tensor

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
    """int64 (programs,): tensor | tile << 32 for every tile of every tensor, on the CPU."""
    tensor = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    first = torch.tensor([0, *counts]).cumsum(0)[:-1]
    return (torch.arange(len(tensor)) - first[tensor]) << 32 | tensor


def upload(values: List[int], device: torch.device) -> Tensor:
    """int64 on `device`, copied from pinned memory (which the allocator keeps until then) without waiting."""
    host = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def contiguous(tensors: List[Tensor]) -> List[Tensor]:
    """The tensors; contiguous copies if any of them is not."""
    if all(map(Tensor.is_contiguous, tensors)):
        return tensors
    return [tensor.contiguous() for tensor in tensors]


def aligned(tensors: List[Tensor]) -> tuple[List[Tensor], List[int]]:
    """Contiguous tensors aligned to 16 bytes, as vector loads want them, and their addresses; others are copied.

    No Python call per tensor: a step does this for a thousand gradients.
    """
    addresses = list(map(Tensor.data_ptr, tensors))
    if reduce(operator.or_, addresses, 0) & 15:
        tensors = [tensor.clone() if tensor.data_ptr() & 15 else tensor for tensor in tensors]
        addresses = list(map(Tensor.data_ptr, tensors))
    return tensors, addresses
