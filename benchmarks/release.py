"""Bytes per parameter of a training step, all in: weights, masters, moments, gradients, temporaries.

    python -m benchmarks.release

1.07 B BF16 parameters in 64 matrices and one token, so that activations weigh nothing: the peak of allocated memory
over a whole step, with gradients kept until `step()` and with `release_gradients`. One row of results/release.jsonl.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from torch import nn

import overcoat
from benchmarks.common import RESULTS, append_row

WIDTH, LAYERS = 4096, 64


def measure(released: bool, master: str) -> dict[str, float]:
    """Peak bytes per parameter and ms of a step that is not the first."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to("cuda", torch.bfloat16)
    optimizer = overcoat.AdamW(model.parameters(), lr=1e-5, master=master)
    handle = overcoat.release_gradients(model, optimizer) if released else None
    x = torch.randn(1, WIDTH, device="cuda", dtype=torch.bfloat16)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(4):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start.record()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    end.record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    if handle is not None:
        handle.remove()  # the parameters' hooks hold the optimizer, and it holds them
    return {"bytes_per_parameter": peak / (WIDTH * WIDTH * LAYERS), "step_ms": start.elapsed_time(end)}


def main() -> None:
    """Measure all four and append the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "release.jsonl")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for master in ("bf16+8", "bf16"):
        for released in (False, True):
            name = f"{master}, {'released' if released else 'kept'} gradients"
            figures[name] = measure(released, master)
            print(name, figures[name])
            gc.collect()
            torch.cuda.empty_cache()
    append_row(arguments.out, {"parameters": WIDTH * WIDTH * LAYERS, "runs": figures})


if __name__ == "__main__":
    main()
