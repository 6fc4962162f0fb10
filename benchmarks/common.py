"""What the research scripts share with `overcoat bench`: the clock and the format of result rows."""

from __future__ import annotations

from pathlib import Path

from overcoat.bench.rows import append_row, environment
from overcoat.bench.timing import copy_bandwidth, time_ms

__all__ = ["RESULTS", "append_row", "copy_bandwidth", "environment", "time_ms"]

RESULTS = Path(__file__).parent / "results"
