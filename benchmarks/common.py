"""Where result rows go, in which format, and the allocator's settings for rows about memory."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.rows import append_row

__all__ = ["RESULTS", "allocator", "append_row"]

RESULTS = Path(__file__).parent / "results"


def allocator() -> dict[str, str]:
    """What the environment asks of PyTorch's CUDA allocator."""
    return {"allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""}
