"""One decoder block, forward and backward, ours and its peers in one run: `python -m benchmarks.layer [--shapes ...]`.

Every contestant starts from the same Hugging Face Llama layer with the same weights and input:

    ours         `overcoat.convert` under several recipes, eager
    bf16         the layer as it is, eager and under torch.compile
    torchao      its float8 training recipes under torch.compile (left out if torchao is not installed)

Reported per contestant: forward and forward + backward in ms (windows of steps, launch overhead included), MiB kept
between forward and backward (allocated, without the result) also in units U = T * H * 2 bytes, and peak MiB. With
`--accuracy` the SQNR in dB of the output and of every gradient against the same layer in FP64, on 1024 tokens.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import Tensor, nn

import overcoat
from benchmarks.common import RESULTS, append_row, copy_bandwidth
from overcoat import Recipe


class Shape(NamedTuple):
    """A Llama block: batch, sequence, hidden, intermediate, query and key/value heads."""

    batch: int
    sequence: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int


SHAPES = {
    "7b-s2048": Shape(4, 2048, 4096, 11008, 32, 32),
    "7b-s4096": Shape(4, 4096, 4096, 11008, 32, 32),
    "1b-s2048": Shape(4, 2048, 2048, 5504, 16, 16),
    "1b-s4096": Shape(4, 4096, 2048, 5504, 16, 16),
    "llama3-8b": Shape(4, 2048, 4096, 14336, 32, 8),
    "13b": Shape(4, 2048, 5120, 13824, 40, 40),
    "30b": Shape(2, 2048, 6656, 17920, 52, 52),
}
RECIPES = {
    "ours": Recipe(),
    "ours attention bf16": Recipe(kept_attention="bf16"),
    "ours paper": Recipe.paper(),
    "ours leanest": Recipe.leanest(),
}


class Contestant(NamedTuple):
    """A layer to run: its parameters' owner and the call."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]


def build(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A Llama model of one layer on the GPU, and its cos and sin."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=1,
        vocab_size=32,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaModel(config).to("cuda", dtype).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.2, 1.8)
    positions = torch.arange(shape.sequence, device="cuda")[None]
    tables = model.rotary_emb(torch.empty(1, dtype=dtype, device="cuda"), positions)
    return model, tables


def _run_layer(layer: Callable[..., Any], tables: tuple[Tensor, Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        y = layer(x, attention_mask=None, position_embeddings=tables)
        return y[0] if isinstance(y, tuple) else y

    return call


def contestants(model: nn.Module, tables: tuple[Tensor, Tensor], compiled: bool) -> Iterator[tuple[str, Contestant]]:
    """Name and layer of everyone who takes part; each is a copy of `model`."""
    for name, recipe in RECIPES.items():
        ours: Any = copy.deepcopy(model)
        overcoat.convert(ours, recipe)
        yield name, Contestant(ours, _run_layer(ours.layers[0], tables))
    eager: Any = copy.deepcopy(model)
    yield "bf16 eager", Contestant(eager, _run_layer(eager.layers[0], tables))
    if compiled:
        yield "bf16 compile", Contestant(eager, _run_layer(torch.compile(eager.layers[0]), tables))
    for name, layer in _torchao(model):
        yield name, Contestant(layer, _run_layer(torch.compile(layer) if compiled else layer, tables))


def _torchao(model: Any) -> Iterator[tuple[str, Any]]:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        print(f"torchao left out: {error}")
        return
    for recipe in ("tensorwise", "rowwise"):
        layer = copy.deepcopy(model.layers[0])
        convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
        yield f"torchao {recipe}", layer


def _window_ms(step: Callable[[], Any], steps: int = 10, windows: int = 7) -> float:
    """ms of one step in steady state: median over windows of several steps."""
    for _ in range(3):
        step()
    times = []
    for _ in range(windows):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(steps):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / steps)
    return statistics.median(times)


def measure(contestant: Contestant, x: Tensor, dy: Tensor) -> dict[str, float]:
    """Times in ms, bytes kept and peak bytes of one forward and backward."""
    unit = x.nbytes
    x = x.clone().requires_grad_()

    def forward() -> Tensor:
        return contestant.call(x)

    def step() -> None:
        x.grad = None
        contestant.module.zero_grad(set_to_none=True)
        forward().backward(dy)

    total = _window_ms(step)
    figures = {"forward_ms": _window_ms(forward), "total_ms": total}
    x.grad = None
    contestant.module.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = forward()
    kept = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
    y.backward(dy)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {**figures, "kept_bytes": kept, "kept_units": kept / unit, "peak_bytes": peak}


def run_shape(name: str, shape: Shape) -> dict[str, dict[str, float]]:
    """Measure everyone on one shape and print the table."""
    model, tables = build(shape)
    x, dy = (torch.randn(shape.batch, shape.sequence, shape.hidden, device="cuda").bfloat16() for _ in range(2))
    print(
        f"\n{name} {shape}\n{'':22s} {'fwd ms':>8s} {'total ms':>9s} {'kept U':>7s} {'kept MiB':>9s} {'peak MiB':>9s}"
    )
    rows = {}
    for who, contestant in contestants(model, tables, compiled=True):
        row = rows[who] = measure(contestant, x, dy)
        print(
            f"{who:22s} {row['forward_ms']:8.3f} {row['total_ms']:9.3f} {row['kept_units']:7.2f} "
            f"{row['kept_bytes'] / 2**20:9.1f} {row['peak_bytes'] / 2**20:9.1f}",
            flush=True,
        )
        del contestant
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return rows


def sqnr(truth: Tensor, got: Tensor) -> float:
    """10 log10 of signal over noise power, in dB."""
    noise = (got.double() - truth.double()).square().sum()
    return 10 * math.log10(truth.double().square().sum() / noise) if noise > 0 else math.inf


def _results(contestant: Contestant, parameters: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = contestant.call(x)
    y.backward(dy)
    assert x.grad is not None
    grads = {name.removeprefix("layers.0."): p.grad for name, p in parameters.named_parameters() if p.grad is not None}
    return {"output": y.detach(), "dx": x.grad, **grads}


def run_accuracy() -> dict[str, dict[str, float]]:
    """SQNR of everyone against FP64, output and gradients, on a 7B block with 1024 tokens and outlier channels."""
    shape = Shape(1, 1024, 4096, 11008, 32, 32)
    model, tables = build(shape)
    scales = torch.ones(shape.hidden, device="cuda")
    scales[:: shape.hidden // 8] = 20.0
    x = (torch.randn(1, shape.sequence, shape.hidden, device="cuda") * scales).bfloat16()
    dy = torch.randn_like(x)
    exact: Any = copy.deepcopy(model).double()
    wide = (tables[0].double(), tables[1].double())
    truth = _results(Contestant(exact, _run_layer(exact.layers[0], wide)), exact, x.double(), dy.double())
    rows = {}
    print(
        "\nSQNR in dB against FP64\n" + " " * 22,
        *(f"{name.split('.')[-2][:9]:>9s}" if "." in name else f"{name:>9s}" for name in truth),
    )
    for who, contestant in contestants(model, tables, compiled=False):
        got = _results(contestant, contestant.module, x, dy)
        rows[who] = {name: sqnr(truth[name], got[name]) for name in truth}
        print(f"{who:22s}", *(f"{value:9.1f}" for value in rows[who].values()), flush=True)
    return rows


def main() -> None:
    """Run the shapes, append one row to benchmarks/results/layer.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["7b-s2048"], choices=list(SHAPES))
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "layer.jsonl")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"copy_bandwidth": copy_bandwidth()}
    figures["shapes"] = {name: run_shape(name, SHAPES[name]) for name in arguments.shapes}
    if arguments.accuracy:
        figures["sqnr"] = run_accuracy()
    append_row(arguments.out, figures)


if __name__ == "__main__":
    main()
