"""What the research scripts share with `overcoat bench`: the clock and the format of result rows."""

from __future__ import annotations

import os
from pathlib import Path

from overcoat.bench.rows import append_row, environment
from overcoat.bench.timing import copy_bandwidth, time_ms

__all__ = ["RESULTS", "allocator", "append_row", "copy_bandwidth", "environment", "time_ms"]

RESULTS = Path(__file__).parent / "results"


def allocator() -> dict[str, str]:
    """What the environment asks of PyTorch's CUDA allocator, for rows about memory."""
    return {"allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""}
