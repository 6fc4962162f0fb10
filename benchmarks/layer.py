"""one decoder block, forward and backward, ours and its peers on the same weights and input.

    forward, backward, total   ms in steady state, launches included; backward is total - forward
    host                       ms that the host takes to queue forward and backward while the GPU is busy: a block whose
                               total is near this is the host's, and slower on a slower core
    kept                       allocated between forward and backward, without the result, and with the input if the
                               block holds on to it: what each block of a model adds. U = tokens x hidden x 2 bytes
    peak                       the most allocated during forward and backward, parameter gradients included

`--experts` measures the branch of a mixture of experts alone, norm, router and residual included (experts.py), with
    load                       tokens of the busiest expert over the mean; routers' weights are scaled to be uneven

Of CUDA graphs the total and the host's time alone. Layers with a sliding window get transformers' mask; ours get none,
as in a converted model.

`--accuracy [MODEL]` adds the SQNR in dB of the output and of every gradient against the same block in FP64, on
sequences of 1024 tokens with outlier channels; `--planted` has worse ones: a norm weight of 10 in every seventh channel
and inputs 30 times too large in one. Signal and noise of `--draws` draws are added up. `--shapes --accuracy`: no times.
"""

from __future__ import annotations

import argparse
import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from benchmarks.contestants import ENGINES, Block, make_block
from benchmarks.experts import PRODUCT_COLUMNS, WAYS, grouped_calls, largest_load, make_branch, measure_product
from benchmarks.rows import Column, Row, decimals
from benchmarks.session import Session, add_common_arguments, attempt, matches
from benchmarks.shapes import BlockShape, block_shape, build_block
from benchmarks.timing import host_ms, steady_ms
from overcoat.estimate.command import positive
from overcoat.models.shapes import MODELS

STEPS, WINDOWS = 10, 7
OUTLIER_CHANNELS, OUTLIER = 8, 20.0
PLANTED_INPUT, PLANTED_WEIGHT, PLANTED_EVERY = 30.0, 10.0, 7
ACCURACY_TOKENS, ACCURACY_DRAWS = 1024, 8
MEBI = 2.0**-20
COLUMNS = (
    Column("fwd ms", "forward_ms", decimals(3)),
    Column("bwd ms", "backward_ms", decimals(3)),
    Column("total ms", "total_ms", decimals(3)),
    Column("host ms", "host_ms", decimals(2)),
    Column("kept U", "kept_units", decimals(2)),
    Column("kept MiB", "kept_bytes", decimals(1, MEBI)),
    Column("peak U", "peak_units", decimals(2)),
    Column("peak MiB", "peak_bytes", decimals(1, MEBI)),
)
EXPERT_COLUMNS = (*COLUMNS, Column("load", "largest_load", decimals(2)))
# Columns of the accuracy table: title and result.
RESULTS = {
    **{name: name for name in ("output", "dx")},
    **{name: f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "norm 1": "input_layernorm.weight",
    "norm 2": "post_attention_layernorm.weight",
}
# Of the norms the standard errors too: the others' are a tenth of a dB.
SQNR_COLUMNS = (
    *(Column(title, key, decimals(1)) for title, key in RESULTS.items()),
    *(Column(f"+- {title}", f"{RESULTS[title]}_error", decimals(1)) for title in ("norm 1", "norm 2")),
)


def measure(name: str, shape: BlockShape) -> Row:
    """Times in ms and bytes of one contestant."""
    model, inputs = build_block(shape, torch.bfloat16, "cuda")
    return measure_block(make_block(name, model, inputs), *_data(model, shape, "cuda"), ENGINES[name].graphs)


def measure_experts(name: str, shape: BlockShape, device: str = "cuda") -> Row:
    """Times in ms and bytes of one contestant's branch of experts, and how uneven their loads are."""
    model, _ = build_block(shape, torch.bfloat16, device)
    x, dy = _data(model, shape, device)
    block = make_branch(name, model)
    return {**measure_block(block, x, dy), "largest_load": largest_load(block, x)}


def measure_products(shape: BlockShape) -> Row:
    """{name: figures} of the grouped GEMMs of our branch's step."""
    model, _ = build_block(shape, torch.bfloat16, "cuda")
    x, dy = _data(model, shape, "cuda")
    calls = grouped_calls(make_branch("overcoat", model), x, dy)
    return {name: attempt(measure_product, call) for name, call in calls.items()}


def _data(model: Any, shape: BlockShape, device: str) -> tuple[Tensor, Tensor]:
    size = (shape.batch, shape.sequence, model.config.hidden_size)
    x, dy = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return x.requires_grad_(), dy


def measure_block(block: Block, x: Tensor, dy: Tensor, graphs: bool = False) -> Row:
    """Times in ms and, on a GPU, bytes and the host's time; graphs: it is CUDA graphs."""

    def forward() -> Tensor:
        return block.call(x)

    def step() -> None:
        x.grad = None
        block.layer.zero_grad(set_to_none=True)
        forward().backward(dy)

    # Waking autograd's own thread takes up to a millisecond. A model pays that once per step, not once per block: here
    # everyone's backward runs on the calling thread.
    with torch.autograd.set_multithreading_enabled(False):
        figures = {"total_ms": steady_ms(step, WINDOWS, STEPS)["ms"]}
        if x.is_cuda:
            figures["host_ms"] = host_ms(step)
        if graphs:
            # A forward alone would be captured anew, and a graph's own memory is neither freed nor counted as others'.
            return figures
        ahead = steady_ms(forward, WINDOWS, STEPS)["ms"]
    x.grad = None
    block.layer.zero_grad(set_to_none=True)
    bytes_of = _memory(block, x, dy) if x.is_cuda else {}
    return {"forward_ms": ahead, "backward_ms": figures["total_ms"] - ahead, **figures, **bytes_of}


def _memory(block: Block, x: Tensor, dy: Tensor) -> dict[str, float]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    # The input is made here and let go, so that it counts if and only if the block holds on to it.
    y = block.call(x.clone())
    kept = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
    y.backward(dy)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {"kept_bytes": kept, "kept_units": kept / x.nbytes, "peak_bytes": peak, "peak_units": peak / x.nbytes}


def accuracy(
    name: str, shape: BlockShape, draws: int = ACCURACY_DRAWS, device: str = "cuda", planted: bool = False
) -> Row:
    """SQNR in dB of one contestant's output and gradients against the same block in FP64, over `draws` draws;
    "NAME_error" beside each is its standard error (the jackknife's: without one draw at a time)."""
    drawn = [draw_powers(name, shape, draw, device, planted) for draw in range(draws)]
    found: Row = {"draws": draws}
    for key in drawn[0]:
        each = torch.stack([powers[key] for powers in drawn])
        found[key] = decibels(*each.sum(0))
        if draws > 1:
            without_one = torch.tensor([decibels(*rest) for rest in each.sum(0) - each], dtype=torch.float64)
            found[f"{key}_error"] = (draws - 1) / math.sqrt(draws) * without_one.std().item()
    return found


def draw_powers(name: str, shape: BlockShape, seed: int, device: str, planted: bool = False) -> dict[str, Tensor]:
    """Signal and noise power (2,) of every result, on weights and data drawn with `seed`. Delayed scales are measured
    in the second step on the same data, which they then fit: at their best."""
    model, inputs = build_block(shape, torch.bfloat16, device, seed)
    hidden = model.config.hidden_size
    outliers = torch.ones(hidden, device=device)
    if planted:
        outliers[hidden // 3] = PLANTED_INPUT
        for weight in (p for key, p in model.named_parameters() if "norm" in key):
            weight.data[..., ::PLANTED_EVERY] = PLANTED_WEIGHT
    else:
        outliers[:: hidden // OUTLIER_CHANNELS] = OUTLIER
    x = (torch.randn(shape.batch, shape.sequence, hidden, device=device) * outliers).bfloat16()
    dy = torch.randn_like(x)
    exact_inputs = tree_map_only(Tensor, lambda given: given.double() if given.is_floating_point() else given, inputs)
    exact = make_block("bf16 eager", copy.deepcopy(model).double(), exact_inputs, attention="default")
    truth = results(exact, x.double(), dy.double())
    block = make_block(name, model, inputs, compiled=False, attention="default")
    if ENGINES[name].delayed:  # the first step has no maxima to scale by
        results(block, x, dy)
        block.layer.zero_grad(set_to_none=True)
    got = results(block, x, dy)
    return {key: powers(truth[key], value) for key, value in got.items()}


def results(block: Block, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Output, gradient of the input, gradients of the parameters."""
    x = x.clone().requires_grad_()
    y = block.call(x)
    y.backward(dy)
    assert x.grad is not None
    return {"output": y.detach(), "dx": x.grad, **block.gradients()}


def powers(truth: Tensor, got: Tensor) -> Tensor:
    """Sum of squares of the signal and of the noise, (2,) FP64."""
    truth = truth.double()
    return torch.stack([truth.square().sum(), (got.double() - truth).square().sum()]).cpu()


def decibels(signal: Tensor, noise: Tensor) -> float:
    """10 log10 of signal over noise power."""
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)  # NaN stays NaN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = f"{', '.join(MODELS)} with 2048 tokens in a row or as many as it says, or all (default 7b-s2048)"
    parser.add_argument("--shapes", nargs="*", metavar="MODEL[.KIND][-sTOKENS]", default=["7b-s2048"], help=shapes)
    parser.add_argument("--experts", action="store_true", help="the branch of experts alone")
    against = "also the SQNR of every result against FP64 (default of MODEL: llama-2-7b)"
    parser.add_argument("--accuracy", nargs="?", const="llama-2-7b", metavar="MODEL", help=against)
    parser.add_argument("--planted", action="store_true", help="accuracy with large norm weights and a large channel")
    draws = f"of weights and data, for it (default {ACCURACY_DRAWS})"
    parser.add_argument("--draws", type=positive, default=ACCURACY_DRAWS, help=draws)
    add_common_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    shapes = {name: block_shape(name) for name in (MODELS if "all" in parsed.shapes else parsed.shapes)}
    session = Session(parsed, EXPERT_COLUMNS if parsed.experts else COLUMNS)
    needs = {name: engine.needs for name, engine in ENGINES.items()}
    for shape, block in shapes.items():
        size = f"batch {block.batch}, sequence {block.sequence}, {block.model}"
        if parsed.experts:
            session.table(f"{shape}, experts alone: {size}")
            ways = {name: way.needs for name, way in WAYS.items()}
            session.everyone(ways, measure_experts, block, shape=shape, part="experts")
            if matches("products", parsed.only):
                session.table(f"{shape}, grouped GEMMs beside torch._scaled_grouped_mm", PRODUCT_COLUMNS)
                for name, figures in session.call(measure_products, block).items():
                    session.add({"shape": shape, "part": "products", "name": name, **figures})
            continue
        session.table(f"{shape}: {size}")
        session.everyone(needs, measure, block, shape=shape)
    if parsed.accuracy:
        exact = block_shape(parsed.accuracy)._replace(batch=1, sequence=ACCURACY_TOKENS)
        title = f"SQNR in dB against FP64, {parsed.accuracy}, 1024 tokens, {parsed.draws} draws"
        session.table(f"{title}, planted outliers" if parsed.planted else title, SQNR_COLUMNS)
        labels = {"shape": "accuracy", "model": parsed.accuracy, "planted": parsed.planted}
        session.everyone(needs, accuracy, exact, parsed.draws, "cuda", parsed.planted, **labels)
    return 0
