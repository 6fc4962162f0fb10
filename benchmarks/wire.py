"""What FSDP2 sends between GPUs in a training step, and how much of it computing hides.

    python -m benchmarks.wire --gpus 2                     Llama-2-7B of 8 layers, 4 x 2048 on each GPU
    python -m benchmarks.wire --gpus 2 --trace folder      and each one's trace, for chrome://tracing

One step of a contestant of `benchmarks.model` is profiled on rank 0, after warm-up. One row of results/wire.jsonl:

    gathered, reduced   bytes that one GPU receives: of a collective's N parts all but its own
    nccl_ms             time in which at least one collective's kernel runs; exposed_ms: of it, while no other does
    step_ms             from the first kernel to the end of the last one
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import RESULTS, append_row
from benchmarks.model import WARMUP, Training, Work
from overcoat.models.shapes import MODELS

CONTESTANTS = ("overcoat", "overcoat fp8 all-gather", "bf16 compile, torch AdamW", "torchao tensorwise, torch AdamW")
BYTES = {"Byte": 1, "Char": 1, "Float8_e4m3fn": 1, "BFloat16": 2, "Float": 4}
Interval = tuple[float, float]


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time, in intervals that do not touch."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in union(intervals))


def wire(events: list[dict[str, Any]]) -> dict[str, float]:
    """The figures above, from a Chrome trace's events (times in us)."""
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    span = {False: [], True: []}  # type: dict[bool, list[Interval]]
    received = {"gathered": 0.0, "reduced": 0.0}
    for event in kernels:
        collective = event["name"].startswith("nccl")
        span[collective].append((event["ts"], event["ts"] + event["dur"]))
        arguments = event.get("args", {})
        name = arguments.get("Collective name", "")
        if collective and ("allgather" in name or "reduce_scatter" in name):
            size, dtype = int(arguments["Group size"]), BYTES[arguments["dtype"]]
            whole = max(arguments["In msg nelems"], arguments["Out msg nelems"]) * dtype
            received["gathered" if "allgather" in name else "reduced"] += whole * (size - 1) / size
    everything = union(span[True] + span[False])
    return {
        **received,
        "step_ms": (everything[-1][1] - everything[0][0]) / 1e3,
        "nccl_ms": length(span[True]) / 1e3,
        "exposed_ms": (length(everything) - length(span[False])) / 1e3,
    }


def _rank(rank: int, folder: str, name: str, work: Work) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=work.gpus)
    training = Training(name, work)
    for _ in range(WARMUP):
        training.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        training.step()
        torch.cuda.synchronize()
    if rank == 0:
        trace.export_chrome_trace(f"{folder}/trace.json")
    dist.barrier()
    os._exit(0)  # as in benchmarks.model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="llama-2-7b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--only", nargs="+", default=CONTESTANTS, metavar="NAME")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "wire.jsonl")
    parsed = parser.parse_args()
    model = MODELS[parsed.model].changed(num_hidden_layers=parsed.layers)
    for name in parsed.only:
        work = Work(model, parsed.batch, parsed.sequence, gpus=parsed.gpus)
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_rank, (folder, name, work), nprocs=parsed.gpus, start_method="spawn")
            trace = Path(folder, "trace.json").read_text()
        if parsed.trace:
            parsed.trace.mkdir(parents=True, exist_ok=True)
            (parsed.trace / f"{name.replace(' ', '-').replace(',', '')}.json").write_text(trace)
        labels = {key: getattr(parsed, key) for key in ("model", "layers", "gpus", "batch", "sequence")}
        row = {"benchmark": "wire", "name": name, **labels, **wire(json.loads(trace)["traceEvents"])}
        append_row(parsed.out, row)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
