"""Where a host that waits for the GPU is an error, in the forward and in autograd's threads alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """RuntimeError at every call of PyTorch's that waits: `.item()`, a copy from pageable memory, `nonzero`."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
