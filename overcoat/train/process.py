"""What one process is in a run: its device, its memory, how it is told to stop. Today a run is one process.

What will differ between the processes of a run is decided here, and asked for by the rest of the trainer.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch

from overcoat.train.config import require


def check_alone() -> None:
    """Refuse to be one of several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("WORLD_SIZE is above 1, but this version trains on one device: start it without torchrun")


def choose_device(name: str) -> torch.device:
    """`train.device` as a device; "auto" is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    require(device.type in ("cuda", "cpu"), f"train.device = {name!r}: expected cuda, cpu or auto")
    is_gpu = device.type == "cuda"
    require(not is_gpu or torch.cuda.is_available(), f"train.device = {name!r}: PyTorch sees no CUDA GPU here")
    count = torch.cuda.device_count() if is_gpu else 1
    require((device.index or 0) < count, f"train.device = {name!r}: there are {count}, counted from 0")
    return device


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has, in use or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class StopRequest:
    """Turns SIGTERM and the first Ctrl-C into a request the loop honours between two steps; a second Ctrl-C insists."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
