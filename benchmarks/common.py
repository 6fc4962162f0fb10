"""What the benchmarks share: timing with CUDA events, the copy bandwidth to compare with, and result rows.

A row of `benchmarks/results/*.jsonl` names the date, the commit, the GPU, the versions and the command, and holds the
figures of one run: ours and the peers' from the same run, since only their ratios travel between machines.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable

import torch

RESULTS = Path(__file__).parent / "results"
# Larger than any cache of today's GPUs.
FLUSH_BYTES = 256 * 2**20
# Keeps the GPU busy while Python queues the work, so that events time the device alone: about 0.6 ms.
LEAD_CYCLES = 1_000_000


def time_ms(function: Callable[[], Any], repeats: int = 20, warmup: int = 3) -> dict[str, float]:
    """Median, 20th and 80th percentile of the device time of `function`, in ms, each run with cold caches."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(warmup):
        function()
    events = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(LEAD_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return {
        "ms": statistics.median(times),
        "p20": times[len(times) // 5],
        "p80": times[len(times) * 4 // 5],
    }


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes counted."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_ms(lambda: target.copy_(source), repeats=10)["ms"] * 1e3


def environment() -> dict[str, str]:
    """Where and with what a row was measured."""
    import triton

    # A copy without its repository (a GPU machine, say) is told its commit.
    commit = os.environ.get("OVERCOAT_COMMIT") or _git_commit()
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(["python -m", _module_name(), *sys.argv[1:]]),
    }


def _git_commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return result.stdout.strip() or "unknown"


def _module_name() -> str:
    path = Path(sys.argv[0])
    return f"{path.parent.name}.{path.stem}"


def append_row(path: Path, figures: dict[str, Any]) -> None:
    """Append one run, with its environment, to a JSON-lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({**environment(), **figures}) + "\n")
