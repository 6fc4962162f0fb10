"""whole training steps of a whole model with a real optimizer, ours and assembled peers.

    tokens/s    batch x sequence over the median time of a step: forward, loss, backward, optimizer
    TFLOP/s     what the model needs, whatever is recomputed or quantized: per step of T tokens in sequences of S
                    6 N T            forward and backward of all products; N: parameters without the embedding's table,
                                     which is looked up, not multiplied (tied to the head it counts, as the head), and
                                     of experts only as many as a token visits
                  + 6 L T S d        attention; L layers, d = heads x head width: 4 S^2 d forward per sequence, twice
                                     that backward, halved because causal
                 + of a vision tower the same of its own, not halved; of a frozen one the forward alone
    kept        allocated between forward and backward; of CUDA graphs in the first pass, with its workspaces
    peak        the most allocated during the timed steps; of CUDA graphs the most ever: theirs is allocated before

Random tokens, fresh in every step. First all at one batch; with `--best` each also at larger ones, doubled until memory
is out or doubling brings less than 1%, then bisected.

"streamed": layers' weights and optimizer states in host memory (`overcoat.stream`), made there.

`--gpus N`: FSDP2 over N GPUs, as many rows on each; tokens/s and TFLOP/s are of one GPU, kept and peak of the fullest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.contestants import CUSTOM, TRAINERS, WAYS, trainer_of
from benchmarks.rows import Column, Row, decimals, line
from benchmarks.session import OUT_OF_MEMORY, Session, add_common_arguments, load_pytorchs_cudnn, matches, say
from benchmarks.shapes import build_model, head_dim
from benchmarks.timing import steady_ms, synchronize
from overcoat.estimate.command import positive
from overcoat.models.compiled import begin_pass
from overcoat.models.dummy_batch import SIDE, freeze_tower, images, patches, sees, tokens, tower_parameters
from overcoat.models.shapes import MODELS, Model

WARMUP = 3
# Doubling the batch must bring this much, or larger ones are not tried.
LEAST_GAIN = 1.01
GIBI = 2.0**-30
COLUMNS = (
    Column("batch", "batch", str),
    Column("tok/s", "tokens_per_second", decimals(0)),
    Column("TFLOP/s", "TFLOP_per_s", decimals(0)),
    Column("step ms", "ms", decimals(1)),
    Column("kept GiB", "kept_bytes", decimals(1, GIBI)),
    Column("peak GiB", "peak_bytes", decimals(1, GIBI)),
    Column("reserved", "reserved_bytes", decimals(1, GIBI)),
    Column("loss", "loss", decimals(3)),
)


class Work(NamedTuple):
    """Work of a measurement: a model, a step's batch (on each GPU), whether the vision tower is frozen, pixels a side
    of its images, GPUs of FSDP2 (0: without)."""

    model: Model
    batch: int
    sequence: int
    freeze_tower: bool = False
    side: int = SIDE
    gpus: int = 0


def step_flops(parameters: int, tokens: int, sequence: int, config: Any) -> float:
    """Floating-point operations of one training step, by the formula above; `parameters` is its N."""
    width = config.num_attention_heads * head_dim(config)
    return 6.0 * parameters * tokens + 6.0 * config.num_hidden_layers * tokens * sequence * width


def tower_flops(model: Any, inputs: dict[str, Any]) -> float:
    """Return the operations of a vision tower."""
    config, parameters = model.config, tower_parameters(model)
    if not inputs or not parameters:
        return 0.0
    (count, seen), tower = patches(inputs, config), config.vision_config
    numbers = sum(parameter.numel() for parameter in parameters)
    layers = getattr(tower, "depth", None) or tower.num_hidden_layers
    passes = 3.0 if any(parameter.requires_grad for parameter in parameters) else 1.0
    return passes * count * (2.0 * numbers + 4.0 * layers * seen * tower.hidden_size)


def multiplied_parameters(model: Any) -> int:
    """N: all parameters but the embedding's table, unless it is the head as well, experts that a token does not visit,
    and a vision tower's."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(parameter.numel() for parameter in model.parameters())
    total -= sum(parameter.numel() for parameter in tower_parameters(model))
    visited = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0].endswith(".experts"):  # of all experts, one after the other
            total -= parameter.numel() // len(parameter) * (len(parameter) - visited)
    return total if table is head else total - table.numel()


class Training:
    """A contestant at work. loss: of the last step, 0-d; parameters: N of the formula above; flops: of a step;
    kept_bytes: what the last step's forward left allocated, counted while `counts` is true."""

    def __init__(self, name: str, work: Work, device: str = "cuda") -> None:
        self.trainer, self.work = trainer_of(name), work
        self.model = build_model(work.model, torch.bfloat16, "meta" if self.trainer.streamed else device)
        if work.freeze_tower:
            freeze_tower(self.model)
        text = self.model.config.get_text_config()
        self.inputs = images(self.model, work.batch, work.sequence, work.side)
        self.parameters = multiplied_parameters(self.model)
        self.flops = step_flops(self.parameters, work.batch * work.sequence, work.sequence, text)
        self.flops += tower_flops(self.model, self.inputs)
        self.forward, self.optimizer = self.trainer.prepare(self.model, bool(work.gpus))
        torch.manual_seed(dist.get_rank() if work.gpus else 0)  # the model is everyone's, the rows are one's own
        self.loss = torch.zeros((), device=device)
        self.counts, self.kept_bytes = False, 0

    def step(self) -> None:
        """A training step on fresh random tokens."""
        inputs = {**self.inputs, **tokens(self.model, self.work.batch, self.work.sequence, self.inputs)}
        if self.trainer.engine.graphs:
            begin_pass()
        before = torch.cuda.memory_allocated() if self.counts else 0
        value = self.forward(inputs)
        if self.counts:
            self.kept_bytes = torch.cuda.memory_allocated() - before
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.copy_(value.detach())


def measure(name: str, work: Work, steps: int, device: str = "cuda") -> Row:
    """Time and memory of one contestant's training steps."""
    if not work.gpus:
        return _measure(name, work, steps, device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, name, work, steps, device)
        try:
            mp.start_processes(_measure_rank, arguments, nprocs=work.gpus, start_method="spawn")
        except mp.ProcessRaisedException as error:  # its last line says what; before it comes the traceback
            raise RuntimeError(f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}") from error
        rows = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(work.gpus)]
    return {**rows[0], **{key: max(row[key] for row in rows) for key in rows[0] if key.endswith("_bytes")}}


def _measure_rank(rank: int, folder: str, name: str, work: Work, steps: int, device: str) -> None:
    # The process that ends this one at its own end says so by an interrupt, which that one ignores itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if device == "cuda":
        load_pytorchs_cudnn()
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=work.gpus)
    row = _measure(name, work, steps, device)
    Path(folder, f"{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    os._exit(0)  # threads of DTensors' process groups outlive destroy_process_group, and some abort at the end


def _measure(name: str, work: Work, steps: int, device: str) -> Row:
    training, graphs = Training(name, work, device), trainer_of(name).engine.graphs
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # the conversion's, which recording frees: the first pass counts its own
    for index in range(WARMUP):
        training.counts = index == (0 if graphs else WARMUP - 1)
        training.step()
    training.counts = False
    synchronize()
    if device == "cuda" and not graphs:
        torch.cuda.reset_peak_memory_stats()
    timing = steady_ms(training.step, steps, warmup=0)
    loss = training.loss.item()
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} after {WARMUP + steps} steps")
    return {
        **timing,
        "tokens_per_second": work.batch * work.sequence / timing["ms"] * 1e3,
        "TFLOP_per_s": training.flops / timing["ms"] / 1e9,
        "parameters": training.parameters,
        "kept_bytes": training.kept_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "loss": loss,
    }


def search_best_batch(run: Callable[[int], Row], first: Row) -> Row:
    """The row with the most tokens per second, over batches from that of the first row on, or below it if it did not
    fit. run: batch -> its row; {"error": OUT_OF_MEMORY} if it does not fit. Any other error ends the search."""
    rows, speed = [first] if "error" not in first else [], itemgetter("tokens_per_second")
    fits = first["batch"] if rows else 0
    too_large = first["batch"] if first.get("error") == OUT_OF_MEMORY else None
    # Between what fits and what does not: within an eighth the throughput hardly differs.
    while fits or too_large:
        if too_large is not None and too_large - fits <= max(1, fits // 8):
            break
        batch = 2 * fits if too_large is None else (fits + too_large) // 2
        found = run(batch)
        if found.get("error") == OUT_OF_MEMORY:
            too_large = batch
            continue
        if "error" in found:
            break
        gain = speed(found) / speed(rows[-1]) if rows else math.inf
        rows.append(found)
        fits = batch
        if too_large is None and gain < LEAST_GAIN:
            break
    return max(rows, key=speed, default=first)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["llama-2-7b"], choices=MODELS, help="default llama-2-7b")
    parser.add_argument("--batch", type=positive, default=4, help="sequences per step, for all (default 4)")
    parser.add_argument("--sequence", type=positive, default=2048, help="tokens per sequence (default 2048)")
    parser.add_argument("--gpus", type=positive, default=0, help="FSDP2 over so many GPUs (default: one without)")
    parser.add_argument("--best", action="store_true", help="then search each one's best batch")
    parser.add_argument("--steps", type=positive, default=10, help=f"timed steps, after {WARMUP} (default 10)")
    parser.add_argument("--freeze-tower", action="store_true", help="do not train vision towers")
    added = "add a recipe: default offload_blocks=8, say"
    parser.add_argument("--recipe", nargs="+", metavar=("NAME", "FIELD=VALUE"), help=added)
    stay = "with --recipe: streamed, so many layers on the GPU"
    parser.add_argument("--resident", type=positive, nargs="+", default=[], metavar="LAYERS", help=stay)
    add_common_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    if parsed.gpus and parsed.gpus > (there := torch.cuda.device_count()):
        raise ValueError(f"--gpus {parsed.gpus}: PyTorch sees {there}")
    session = Session(parsed, COLUMNS)
    for name in parsed.models:
        _measure_model(session, name, MODELS[name])
    return 0


def _measure_model(session: Session, label: str, model: Model) -> None:
    """Everyone at the common batch, then, if asked for, everyone at larger ones, and the best of each."""
    parsed = session.parsed
    labels: Row = {"layers": model.config().get_text_config().num_hidden_layers, "sequence": parsed.sequence}
    if sees(model.config()):
        labels["tower"] = "frozen" if parsed.freeze_tower else "trained"
    if parsed.gpus:
        labels["gpus"] = parsed.gpus

    def at(batch: int, name: str) -> Row:
        work = Work(model, batch, parsed.sequence, parsed.freeze_tower, gpus=parsed.gpus)
        needs = trainer_of(name).needs
        return session.run(name, measure, (name, work, parsed.steps), needs, model=label, **labels, batch=batch)

    gpus = f", FSDP2 over {parsed.gpus}" if parsed.gpus else ""
    session.table(f"{label}, batch {parsed.batch}, sequence {parsed.sequence}{gpus}: {model}")
    ways = [*WAYS, *[f", streamed, {count} resident" for count in parsed.resident]]
    added = [CUSTOM + " ".join(parsed.recipe) + way for way in ways] if parsed.recipe else []
    trainers = {name: trainer_of(name) for name in [*TRAINERS, *added]}
    # A graph would hold parameters where one gathering had put them; one GPU alone gathers nothing.
    able = [
        name
        for name, t in trainers.items()
        if not (t.engine.graphs or t.streamed if parsed.gpus else t.fp8_all_gather or t.offloads)
    ]
    equal = [at(parsed.batch, name) for name in able if matches(name, parsed.only)]
    if parsed.best:
        session.table(f"{label}, other batches")
        best = [search_best_batch(partial(at, name=row["name"]), row) for row in equal if "absent" not in row]
        session.table(f"{label}, each one's best batch")
        for row in best:
            say(line(row, COLUMNS))
