"""Bytes per parameter of a training step, all in: weights, masters, moments, gradients, temporaries.

    python -m benchmarks.release

BF16 parameters in matrices of 4096 x 4096 and one token, so that activations weigh nothing: the peak of allocated
memory over a whole step, with gradients kept until `step()` and with `release_gradients`; 1.07 B parameters and 6.7 B,
Llama-2-7B's size. cuBLAS' workspace, 64 MiB in every program on a Hopper, is part of the peak; "workspace_bytes" says
how much it was. One row of results/release.jsonl.
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

WIDTH = 4096
LAYERS = {"1.07 B": 64, "6.7 B": 400}


def make_model(layers: int) -> nn.Module:
    """A chain of square products, made on the device."""
    with torch.device("cuda"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)))


def backward(model: nn.Module) -> None:
    """Every parameter's gradient, from one token."""
    x = torch.randn(1, WIDTH, device="cuda", dtype=torch.bfloat16)
    model(x).float().square().mean().backward()


def workspace_bytes() -> int:
    """What a first forward and backward leave behind when their model is gone."""
    before = torch.cuda.memory_allocated()
    backward(make_model(2))
    gc.collect()
    return torch.cuda.memory_allocated() - before


def measure(layers: int, released: bool, master: str) -> dict[str, float]:
    """Peak bytes per parameter and ms of a step that is not the first."""
    model = make_model(layers)
    optimizer = overcoat.AdamW(model.parameters(), lr=1e-5, master=master)
    handle = overcoat.release_gradients(model, optimizer) if released else None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(4):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start.record()
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    end.record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    if handle is not None:
        handle.remove()
    return {"bytes_per_parameter": peak / (WIDTH * WIDTH * layers), "step_ms": start.elapsed_time(end)}


def main() -> None:
    """Measure all and append the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "release.jsonl")
    arguments = parser.parse_args()
    workspace = workspace_bytes()
    print(f"cuBLAS' workspace: {workspace} bytes")
    figures: dict[str, Any] = {}
    for size, layers in LAYERS.items():
        for master in ("bf16+8", "bf16"):
            for released in (False, True):
                name = f"{size}, {master}, {'released' if released else 'kept'} gradients"
                figures[name] = measure(layers, released, master)
                print(name, figures[name])
                gc.collect()
                torch.cuda.empty_cache()
    append_row(arguments.out, {"workspace_bytes": workspace, "runs": figures})


if __name__ == "__main__":
    main()
