"""`overcoat bench model`: whole training steps of a whole model with a real optimizer, ours and assembled peers.

    tokens/s    batch x sequence over the median time of a step: forward, loss, backward, optimizer
    TFLOP/s     what the model needs, whatever is recomputed or quantized: per step of T tokens in sequences of S
                    6 N T            forward and backward of all products; N: parameters without the embedding's table,
                                     which is looked up, not multiplied (tied to the head it counts, as the head)
                  + 6 L T S d        attention; L layers, d = heads x head width: 4 S^2 d forward per sequence, twice
                                     that backward, halved because causal
    peak        the most allocated during the timed steps: weights, gradients, optimizer, activations. With CUDA graphs
                the most ever: theirs is allocated when they are recorded, before, and stays

Random tokens, fresh in every step. First all at one batch; with `--best` each also at larger ones, doubled until memory
is out or doubling brings less than 1%, then bisected.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overcoat.bench.contestants import TRAINERS
from overcoat.bench.output import Column, Metric, decimals, line
from overcoat.bench.rows import Row
from overcoat.bench.session import OUT_OF_MEMORY, Session, add_common_arguments, say
from overcoat.bench.shapes import build_model, head_dim
from overcoat.bench.timing import steady_ms
from overcoat.estimate.command import positive
from overcoat.models.compiled import begin_pass
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
    Column("peak GiB", "peak_bytes", decimals(1, GIBI)),
    Column("reserved", "reserved_bytes", decimals(1, GIBI)),
    Column("loss", "loss", decimals(3)),
)
METRICS = (
    Metric("tokens per second", ("tokens_per_second",), digits=0),
    Metric("peak memory, GiB", ("peak_bytes",), GIBI),
)


def step_flops(parameters: int, tokens: int, sequence: int, config: Any) -> float:
    """Floating-point operations of one training step, by the formula above; `parameters` is its N."""
    width = config.num_attention_heads * head_dim(config)
    return 6.0 * parameters * tokens + 6.0 * config.num_hidden_layers * tokens * sequence * width


def multiplied_parameters(model: Any) -> int:
    """N: all parameters but the embedding's table, unless it is the head as well."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(parameter.numel() for parameter in model.parameters())
    return total if table is head else total - table.numel()


def training(
    name: str, model: Model, batch: int, sequence: int, device: str = "cuda"
) -> tuple[Callable[[], None], Tensor, int]:
    """One contestant at work: a step on fresh random tokens; the last step's loss, 0-d; N of the formula above."""
    trainer = TRAINERS[name]
    made = build_model(model, torch.bfloat16, device)
    parameters, vocabulary = multiplied_parameters(made), made.config.get_text_config().vocab_size
    forward, optimizer = trainer.prepare(made)
    loss = torch.zeros((), device=device)

    def step() -> None:
        ids = torch.randint(vocabulary, (batch, sequence), device=device)
        if trainer.engine.graphs:
            begin_pass()
        value = forward(ids)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.copy_(value.detach())

    return step, loss, parameters


def measure(name: str, model: Model, batch: int, sequence: int, steps: int) -> Row:
    """Time and memory of one contestant's training steps."""
    step, loss, parameters = training(name, model, batch, sequence)
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    if not TRAINERS[name].engine.graphs:
        torch.cuda.reset_peak_memory_stats()
    timing = steady_ms(step, steps, warmup=0)
    if not math.isfinite(loss.item()):
        raise FloatingPointError(f"the loss is {loss.item()} after {WARMUP + steps} steps")
    tokens, config = batch * sequence, model.config().get_text_config()
    return {
        **timing,
        "tokens_per_second": tokens / timing["ms"] * 1e3,
        "TFLOP_per_s": step_flops(parameters, tokens, sequence, config) / timing["ms"] / 1e9,
        "parameters": parameters,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "loss": loss.item(),
    }


def search_best_batch(run: Callable[[int], Row], first: Row) -> Row:
    """The row with the most tokens per second, over batches from the first one's on, or below it if it did not fit.

    Args:
        run: batch -> its row; {"error": OUT_OF_MEMORY} if it does not fit. Any other error ends the search.
        first: the row of the batch to begin with.
    """
    rows = [first] if "error" not in first else []
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
        gain = _speed(found) / _speed(rows[-1]) if rows else math.inf
        rows.append(found)
        fits = batch
        if too_large is None and gain < LEAST_GAIN:
            break
    return max(rows, key=_speed, default=first)


def _speed(row: Row) -> float:
    return row["tokens_per_second"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["llama-2-7b"], choices=MODELS, help="default llama-2-7b")
    parser.add_argument("--batch", type=positive, default=4, help="sequences per step, for all (default 4)")
    parser.add_argument("--sequence", type=positive, default=2048, help="tokens per sequence (default 2048)")
    parser.add_argument("--best", action="store_true", help="then search each one's best batch")
    parser.add_argument("--steps", type=positive, default=10, help=f"timed steps, after {WARMUP} (default 10)")
    parser.add_argument("--layers", type=positive, help="build only this many layers")
    add_common_arguments(parser, timeout=400.0)


def run(parsed: argparse.Namespace) -> int:
    """Measure everyone wanted on every model."""
    session = Session("model", parsed, COLUMNS, ("transformers",))
    for name in parsed.models:
        model = MODELS[name]
        if parsed.layers is not None:
            model = model.changed(num_hidden_layers=parsed.layers)
        _measure_model(session, name, model)
    session.plot(METRICS)
    return 0


def _measure_model(session: Session, label: str, model: Model) -> None:
    """Everyone at the common batch, then, if asked for, everyone at larger ones, and the best of each."""
    parsed = session.parsed
    labels = {"layers": model.config().get_text_config().num_hidden_layers, "sequence": parsed.sequence}

    def at(batch: int, name: str) -> Row:
        arguments = (name, model, batch, parsed.sequence, parsed.steps)
        return session.run(name, measure, arguments, TRAINERS[name].needs, model=label, **labels, batch=batch)

    session.table(f"{label}, batch {parsed.batch}, sequence {parsed.sequence}: {model}")
    equal = [at(parsed.batch, name) for name in TRAINERS if session.wants(name)]
    session.draw(equal, group=f"{label}, batch {parsed.batch}")
    if parsed.best:
        session.table(f"{label}, other batches")
        best = [search_best_batch(partial(at, name=row["name"]), row) for row in equal if "absent" not in row]
        session.table(f"{label}, each one's best batch")
        for row in best:
            say(line(row, COLUMNS))
        session.draw(best, group=f"{label}, best batch")
