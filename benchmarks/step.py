"""Where the time of a whole training step goes: by kernel, idle, and the clock and power it ran at.

    python -m benchmarks.step                                          Llama-2-7B, batch 4 x 2048: half a minute
    python -m benchmarks.step --layers 2                               the same blocks without a long day's heat
    python -m benchmarks.step --names overcoat "bf16 compile, torch AdamW"   names of `overcoat bench model`

First the step is timed as `overcoat bench model` does, while nvidia-smi tells clock and power; then PyTorch's profiler
sees STEPS more. One row of results/step.jsonl for each contestant: ms by family and by kernel, calls, microseconds a
call, and what of the span between the first kernel and the last no kernel filled ("idle"), by the kernels around it.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import RESULTS, append_row
from overcoat.bench.model import WARMUP, training
from overcoat.bench.shapes import MODELS, ModelShape
from overcoat.bench.timing import steady_ms
from overcoat.bench.trainers import trainers

TIMED, STEPS = 8, 2
LARGEST = 30
_NUMBER = re.compile(r"\d+(\.\d+)?")
# Which kernels are what, the first pattern that fits. The entry kernels of this package are called so.
FAMILIES = {
    "overcoat": r"^\w+_kernel$",
    "attention": r"cudnn|flash|fmha|mha",
    "products": r"nvjet|_gemm|gemm_|cutlass|cublas|splitk",
    "torch.compile": r"^triton_",
    "copies": r"^mem(cpy|set)",
    "PyTorch": r"",
}


class Run(NamedTuple):
    """One run of a kernel; microseconds."""

    name: str
    start: float
    end: float


def family(name: str) -> str:
    """The key of FAMILIES that a kernel belongs to."""
    name = re.sub(r"^void ", "", name)
    return next(found for found, pattern in FAMILIES.items() if re.search(pattern, name, re.IGNORECASE))


def short(name: str) -> str:
    """A kernel's name without arguments and most template parameters."""
    return re.sub(r"^void |\(.*$", "", name)[:90]


def idle(runs: Iterable[Run]) -> dict[str, list[float]]:
    """Microseconds in which no kernel runs, by the kernels before and after."""
    gaps: dict[str, list[float]] = defaultdict(list)
    last: Run | None = None
    for run in sorted(runs, key=lambda run: run.start):
        if last is not None and run.start > last.end:
            gaps[f"{short(last.name)} > {short(run.name)}"].append(run.start - last.end)
        last = run if last is None or run.end > last.end else last
    return gaps


def _largest(times: dict[str, list[float]], steps: int) -> dict[str, dict[str, float]]:
    """The LARGEST of lists of microseconds: ms and calls per step, microseconds a call."""
    largest = sorted(times.items(), key=lambda item: -sum(item[1]))[:LARGEST]
    return {
        name: {"ms": sum(us) / steps / 1e3, "calls": len(us) / steps, "us": statistics.mean(us)} for name, us in largest
    }


def summary(runs: list[Run], steps: int) -> dict[str, Any]:
    """ms per step: by family, by kernel and by gap (the LARGEST of them, with calls and us a call), busy, idle."""
    families: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        families[family(run.name)] += (run.end - run.start) / steps / 1e3
        kernels[short(run.name)].append(run.end - run.start)
    gaps = idle(runs)
    empty = sum(map(sum, gaps.values()))
    span = max(run.end for run in runs) - min(run.start for run in runs)
    return {
        "families": dict(sorted(families.items(), key=lambda item: -item[1])),
        "kernels": _largest(kernels, steps),
        "gaps": _largest(gaps, steps),
        "busy_ms": (span - empty) / steps / 1e3,
        "idle_ms": empty / steps / 1e3,
    }


def profiled(step: Callable[[], None], steps: int) -> list[Run]:
    """The kernels of some steps on the current GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    on_gpu = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    # Ranges that a program names are told as events too.
    return [
        Run(event.name, event.time_range.start, event.time_range.end)
        for event in on_gpu
        if not event.is_user_annotation
    ]


class Meter:
    """Clock in MHz and power in watts, asked of nvidia-smi ten times a second while the context lasts."""

    def __init__(self, device: str) -> None:
        query = "clocks.sm,power.draw,clocks_event_reasons.sw_power_cap"
        self.command = ["nvidia-smi", "-i", device, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        self.lines: list[str] = []

    def __enter__(self) -> Meter:
        try:
            self.process = subprocess.Popen([*self.command, "-lms", "100"], stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            self.process = None  # type: ignore[assignment]
            return self
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()))
        self.reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.reader.join()
            self.process.wait()

    def figures(self) -> dict[str, float | None]:
        """Medians, and the share of samples in which power held the clock down; None where nothing was told."""
        told = [[part.strip() for part in line.split(",")] for line in self.lines]
        samples = [part for part in told if len(part) == 3 and all(map(_NUMBER.fullmatch, part[:2]))]
        if not samples:
            return {"clock_MHz": None, "power_W": None, "power_capped": None}
        return {
            "clock_MHz": statistics.median(float(part[0]) for part in samples),
            "power_W": statistics.median(float(part[1]) for part in samples),
            "power_capped": statistics.mean(part[2] == "Active" for part in samples),
        }


def measure(name: str, shape: ModelShape, batch: int, sequence: int) -> dict[str, Any]:
    """The row of one contestant."""
    step = training(name, shape, batch, sequence).step
    for _ in range(WARMUP):  # torch.compile's minutes are no clock to report
        step()
    torch.cuda.synchronize()
    with Meter(f"GPU-{torch.cuda.get_device_properties(0).uuid}") as meter:
        timing = steady_ms(step, TIMED, warmup=0)
    where = {"name": name, "layers": shape.layers, "batch": batch, "sequence": sequence}
    return {**where, **timing, **meter.figures(), **summary(profiled(step, STEPS), STEPS)}


def _line(item: tuple[str, dict[str, float]]) -> str:
    name, times = item
    return f"{times['ms']:10.3f} {times['calls']:7.1f} {times['us']:10.1f}  {name}"


def text(row: dict[str, Any]) -> str:
    """A row as a table."""
    lines = [
        f"\n{row['name']}, {row['layers']} layers, batch {row['batch']} x {row['sequence']}: {row['ms']:.1f} ms a step",
        f"busy {row['busy_ms']:.1f} ms, idle {row['idle_ms']:.1f}; {row['clock_MHz']} MHz, {row['power_W']} W, "
        f"held down by power in {row['power_capped']} of the samples",
        *(f"{name:14s} {ms:9.3f} ms {ms / row['ms']:7.1%}" for name, ms in row["families"].items()),
        f"\n{'ms a step':>10s} {'calls':>7s} {'us a call':>10s}",
        *map(_line, row["kernels"].items()),
        "\nno kernel between",
        *map(_line, row["gaps"].items()),
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-2-7b", choices=MODELS)
    parser.add_argument("--layers", type=int, help="build only this many layers")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--names", nargs="+", default=["overcoat"], choices=trainers(), metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.jsonl")
    arguments = parser.parse_args()
    shape = MODELS[arguments.model]
    shape = replace(shape, layers=arguments.layers or shape.layers)
    for name in arguments.names:
        row = measure(name, shape, arguments.batch, arguments.sequence)
        print(text(row), flush=True)
        append_row(arguments.out, {"benchmark": "step", "model": arguments.model, **row})
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
