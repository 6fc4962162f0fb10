"""Real training steps on several GPUs under FSDP2: tokens per second, and peak memory against `overcoat.estimate`.

    python -m benchmarks.sharded                        every case of CASES, on all GPUs of this machine
    python -m benchmarks.sharded --only 7b leanest      those with both words in their name
    python -m benchmarks.sharded --device cpu --only small      two processes, gloo: does it run?

One process for each GPU. The model is made on the meta device, converted, sharded (`fully_shard` on every decoder
layer and on the model) and only then given memory, so no GPU ever holds it whole. Random weights and tokens. One row of
results/sharded.jsonl for each case: tokens per second, bytes predicted and measured on each GPU, their relative
difference, to the fullest GPU, and the peaks by kind of phase. The peer is the same model in BF16, its layers compiled,
with fused AdamW on BF16 states; nothing is predicted for it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overcoat
from benchmarks.common import RESULTS, allocator, append_row, environment
from benchmarks.memory import peaks
from overcoat import Recipe
from overcoat.bench.session import positive
from overcoat.bench.shapes import MODELS, ModelShape
from overcoat.bench.timing import steady_ms, summary
from overcoat.bench.trainers import LR, trainers
from overcoat.estimate.dry_run import meta_model
from overcoat.estimate.measure import measure_step
from overcoat.estimate.predict import Predictor, Setup
from overcoat.memory import use_expandable_segments
from overcoat.optim.shards import local

# Steps: before the clock starts, timed, and measured phase by phase. Of these the leanest counts: gloo's threads drop
# what they sent a moment late, in one step or another.
WARMUP, STEPS, MEASURED = 2, 4, 3
WAIT = 120  # seconds, of a process for the others; the first step compiles
PEER = "bf16 compile, torch AdamW"


@dataclass(frozen=True)
class Case:
    """A training step on each GPU: ours, or of the BF16 model compiled (`is_peer`)."""

    name: str
    shape: ModelShape
    batch: int
    sequence: int
    setup: Setup
    is_peer: bool = False


SEVEN = MODELS["llama-2-7b"]
CASES = (
    Case("small", ModelShape(256, 512, 2, 4, 2, 1024), 2, 64, Setup()),
    Case("7b default", SEVEN, 4, 2048, Setup()),
    Case("7b leanest", SEVEN, 4, 2048, Setup(Recipe.leanest())),
    Case("7b accumulation", SEVEN, 4, 2048, Setup(accumulation=2)),
    Case("13b default", MODELS["llama-2-13b"], 2, 2048, Setup()),
    Case(f"7b {PEER}", SEVEN, 4, 2048, Setup(Recipe.bf16()), is_peer=True),
)


class Peer(nn.Module):
    """The BF16 contestant of `overcoat bench model` as the module that FSDP2 takes for its root: ids -> loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.loss_of = trainers()[PEER].prepare(model)

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss_of(ids)


def build(case: Case, device: torch.device, gpus: int) -> nn.Module:
    """The sharded model with random weights on this process' device."""
    assert not case.shape.tied  # the head would be given memory of its own
    model = meta_model(case.shape.config(), case.setup.torch_dtype)
    if not case.is_peer:
        overcoat.convert(model, case.setup.recipe)
    root = Peer(model) if case.is_peer else model
    mesh = init_device_mesh(device.type, (gpus,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    root.to_empty(device=device)
    with device, torch.no_grad():
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers would be empty too
        for parameter in root.parameters():
            own = local(parameter)
            own.normal_(std=0.02) if own.dim() > 1 else own.fill_(1.0)
    return root


def make_step(case: Case, root: nn.Module, device: torch.device) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    """() -> the loss of the last micro-batch, after a whole step; and the optimizer."""
    accumulation = case.setup.accumulation
    kind: Any = torch.optim.AdamW if case.is_peer else overcoat.AdamW
    optimizer = kind(root.parameters(), lr=LR, **({"fused": True} if case.is_peer else case.setup.group))

    def step() -> Tensor:
        for _ in range(accumulation):
            ids = torch.randint(case.shape.vocab, (case.batch, case.sequence), device=device)
            loss = root(ids) if case.is_peer else root(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / accumulation).backward()
        if case.is_peer:
            nn.utils.clip_grad_norm_(root.parameters(), 1.0)
        optimizer.step(**({} if case.is_peer else {"clip_grad_norm": 1.0}))
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def measure(case: Case, device: torch.device, gpus: int) -> dict[str, Any]:
    """This process' part of the row."""
    root = build(case, device, gpus)
    step, optimizer = make_step(case, root, device)
    for _ in range(WARMUP):
        step()
    found: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        found |= steady_ms(step, STEPS, warmup=0)
        found["measured"], found["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        found["outside"] = total - free - found["reserved"]
    else:
        found |= summary([1e3 * timeit.timeit(step, number=1) for _ in range(STEPS)])
    if not case.is_peer:
        runs = []
        for _ in range(MEASURED):
            with measure_step(root, optimizer) as phases:
                step()
            runs.append((max(phases, key=lambda phase: phase.peak), phases))
        fullest, phases = min(runs, key=lambda run: run[0].peak)
        found |= {"measured_moment": fullest.label, "measured_peaks": peaks(phases)}
        found.setdefault("measured", fullest.peak)
    loss = step().item()
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}")
    return {**found, "loss": loss}


def _process(rank: int, case: Case, gpus: int, kind: str, port: int, folder: str) -> None:
    device, backend = torch.device(kind, rank), "nccl" if kind == "cuda" else "gloo"
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, address, timedelta(seconds=WAIT), world_size=gpus, rank=rank)
    found = measure(case, device, gpus)
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"where": environment(), "found": found}))
    dist.barrier()  # one that leaves early takes its connections from the others
    os._exit(0)  # gloo's threads would abort now and then while Python takes everything down


def launch(case: Case, gpus: int, kind: str) -> list[dict[str, Any]]:
    """What each process found, and the environment it ran in."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, args=(case, gpus, kind, port, folder), nprocs=gpus)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(gpus)]


def row_of(case: Case, gpus: int, kind: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all processes beside the prediction."""
    sizes = {"batch": case.batch, "sequence": case.sequence, "accumulation": case.setup.accumulation}
    row = {"case": case.name, "gpus": gpus, "device": kind, **sizes, **max(found, key=lambda part: part["ms"])}
    each = math.prod(sizes.values()) / row["ms"] * 1e3
    row |= {"tokens_per_second_per_gpu": each, "tokens_per_second": gpus * each}
    for name in ("measured", "reserved", "outside"):
        if name in found[0]:
            row[name] = [part[name] for part in found]
    if not case.is_peer:
        prediction = Predictor(case.shape.config()).predict(case.batch, case.sequence, case.setup, gpus)
        predicted = prediction.peak_bytes - (
            0 if kind == "cuda" else prediction.handle_bytes
        )  # a CPU has none of cuBLAS'
        row |= {"parameters": prediction.parameters, "components": prediction.components, "predicted": predicted}
        row |= {"predicted_moment": prediction.moment, "predicted_peaks": peaks(prediction.phases)}
        row["difference"] = predicted / max(row["measured"]) - 1
    return row


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    if "error" in row:
        return f"{row['case']:32s} {row['error']}"
    text = f"{row['case']:32s} {row['tokens_per_second_per_gpu']:8,.0f} tokens/s on each of {row['gpus']}"
    if "measured" in row:
        text += f", measured {' '.join(f'{size / 2**30:.2f}' for size in row['measured'])} GiB"
    if "predicted" in row:
        text += f", predicted {row['predicted'] / 2**30:.2f} ({row['difference']:+.2%}), {row['predicted_moment']}"
    return f"{text}, {row['seconds']:.0f} s"


def run(case: Case, gpus: int, kind: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The row of a case, or why there is none; and the environment of the processes."""
    began = time.perf_counter()
    try:
        parts = launch(case, gpus, kind)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        return {"case": case.name, "gpus": gpus, "error": str(error).strip().splitlines()[-1]}, None
    row = row_of(case, gpus, kind, [part["found"] for part in parts])
    return {**row, "seconds": time.perf_counter() - began}, parts[0]["where"]


def main() -> None:
    """Measure, print a line for each case and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases whose names hold all these words")
    parser.add_argument("--gpus", type=positive, help="processes (default: all GPUs; 2 on the CPU)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / "sharded.jsonl")
    arguments = parser.parse_args()
    use_expandable_segments()  # as `overcoat train` does; the processes inherit the environment
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink's multicast: where it fails, NCCL stops
    gpus = arguments.gpus or (torch.cuda.device_count() if arguments.device == "cuda" else 2)
    if gpus < 2:
        parser.error(f"{gpus} GPU: nothing is sharded; --device cpu runs without")
    for case in CASES:
        if all(word in case.name for word in arguments.only):
            row, where = run(case, gpus, arguments.device)
            print(line(row), flush=True)
            append_row(arguments.out, {**row, **allocator()}, where)


if __name__ == "__main__":
    main()
