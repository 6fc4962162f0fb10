"""one step of ours and of every installed peer, on the same parameters and gradients.

    ms          median of many steps one right after the other, the host running ahead as in training
    state       bytes the optimizer holds on the GPU per parameter: allocated, not summed on paper
    host        bytes of state per parameter in host memory: what offload has moved there
    temporary   bytes per parameter that a step allocates and frees again, at their peak
    all in      weights, gradients, state and temporaries: the peak of allocated memory in a step, per parameter
    traffic     bytes per parameter that a step cannot avoid: weight and state read and written, gradient read
    TB/s, share that traffic over the time, and its share of the bandwidth of a copy

The traffic follows from the state that is there, so it holds for peers too. Checking for non-finite gradients reads
them once more: all decide before the first weight moves. State in host memory crosses PCIe: no traffic there.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Callable, NamedTuple

import torch

from benchmarks.rows import Column, Row, decimals, percent
from benchmarks.session import Session, add_common_arguments
from benchmarks.timing import steady_ms
from overcoat.optim.adamw import AdamW

# Name: (tensors, shape of each)
SIZES = {
    "64x16M": (64, (4096, 4096)),
    "1000x1M": (1000, (1024, 1024)),
    "1x1G": (1, (262144, 4096)),
    # So small that the host shows, who has a thousand to look after or one.
    "1000x16K": (1000, (128, 128)),
    "1x16M": (1, (4096, 4000)),
}
LR, STEPS = 1e-4, 20
COLUMNS = (
    Column("ms", "ms", decimals(3)),
    Column("state B", "state_bytes_per_parameter", decimals(3)),
    Column("host B", "host_bytes_per_parameter", decimals(3)),
    Column("temp. B", "temporary_bytes_per_parameter", decimals(4)),
    Column("all in B", "all_in_bytes_per_parameter", decimals(3)),
    Column("traffic B", "traffic_bytes_per_parameter", decimals(2)),
    Column("TB/s", "TB_per_s", decimals(2)),
    Column("of copy", "share", percent),
)


class Optimizer(NamedTuple):
    """How an optimizer is made, what its parameters are, the packages it needs, how often a step reads gradients, and
    options of ours."""

    make: Callable[[list[torch.nn.Parameter]], Any]
    dtype: torch.dtype = torch.bfloat16
    needs: tuple[str, ...] = ()
    gradient_reads: int = 1
    options: Mapping[str, Any] = MappingProxyType({})


def ours(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Optimizer:
    reads = 2 if options.get("check_finite", True) else 1
    return Optimizer(lambda params: AdamW(params, lr=LR, **options), dtype, gradient_reads=reads, options=options)


def peer(
    module: str, name: str, dtype: torch.dtype = torch.bfloat16, group: Mapping[str, Any] | None = None, **options: Any
) -> Optimizer:
    """Somebody's optimizer with these options, and those of its one parameter group."""

    def make(params: list[torch.nn.Parameter]) -> Any:
        given: Any = params if group is None else [{"params": params, **group}]
        return getattr(importlib.import_module(module), name)(given, **{"lr": LR, **options})

    package = module.split(".")[0]
    needs = {"torch": (), "galore_torch": (package, "bitsandbytes")}.get(package, (package,))
    return Optimizer(make, dtype, needs)


# GaLore as in its README, with the rank of its 7B. In the first step, as in every 200th, it decomposes each gradient
# (SVD), which is not timed, but takes minutes.
GALORE = {"rank": 1024, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
OPTIMIZERS = {
    "overcoat 8bit, bf16+8": ours(),
    "overcoat 8bit, bf16+8, unchecked": ours(check_finite=False),
    "overcoat fp8, bf16+8": ours(moments="fp8"),
    "overcoat fp8, bf16+8, unchecked": ours(moments="fp8", check_finite=False),
    "overcoat 8bit, bf16+16": ours(master="bf16+16"),
    "overcoat 8bit, bf16+16, unchecked": ours(master="bf16+16", check_finite=False),
    "overcoat 8bit, bf16": ours(master="bf16"),
    "overcoat 8bit, bf16, unchecked": ours(master="bf16", check_finite=False),
    "overcoat 8bit, bf16+8, offload": ours(offload=True),
    "overcoat fp8, FP32 parameters": ours(torch.float32, moments="fp8", check_finite=False),
    "torch fused BF16": peer("torch.optim", "AdamW", fused=True),
    "torch fused FP32": peer("torch.optim", "AdamW", torch.float32, fused=True),
    "FlashAdamW 24-bit": peer("flashoptim", "FlashAdamW", master_weight_bits=24),
    "FlashAdamW no master": peer("flashoptim", "FlashAdamW", master_weight_bits=None),
    "torchao AdamWFp8": peer("torchao.optim", "AdamWFp8"),
    "torchao AdamWFp8, stochastic": peer("torchao.optim", "AdamWFp8", bf16_stochastic_round=True),
    "torchao AdamW8bit": peer("torchao.optim", "AdamW8bit"),
    "bitsandbytes AdamW8bit": peer("bitsandbytes.optim", "AdamW8bit"),
    "GaLore AdamW, rank 1024": peer("galore_torch", "GaLoreAdamW", group=GALORE, no_deprecation_warning=True),
    "GaLore AdamW8bit, rank 1024": peer("galore_torch", "GaLoreAdamW8bit", group=GALORE),
}


def measure(name: str, count: int, shape: tuple[int, ...], copy_rate: float) -> Row:
    """Time and memory of one optimizer on `count` fresh parameters of `shape`; `copy_rate` in bytes per second."""
    made = OPTIMIZERS[name]
    optimizer, figures = step_figures(made, {shape: count}, LR, STEPS)
    total, width = figures["parameters"], made.dtype.itemsize
    host = host_bytes(optimizer) / total
    figures["host_bytes_per_parameter"] = host
    if not host:
        traffic = 2 * (width + figures["state_bytes_per_parameter"]) + made.gradient_reads * width
        rate = traffic * total / figures["ms"] * 1e3
        figures |= {"traffic_bytes_per_parameter": traffic, "TB_per_s": rate / 1e12, "share": rate / copy_rate}
    return figures


def step_figures(
    made: Optimizer, shapes: Mapping[tuple[int, ...], int], gradient: float, steps: int, warmup: int = 3
) -> tuple[Any, Row]:
    """Return an optimizer of fresh parameters, so many of each shape, and the time and bytes of its steps; gradient:
    standard deviation of theirs. RuntimeError: a step changed nothing."""
    torch.manual_seed(0)
    start = torch.cuda.memory_allocated()
    params = [
        torch.nn.Parameter(_normal(shape, made.dtype, 0.02)) for shape, count in shapes.items() for _ in range(count)
    ]
    for param in params:
        param.grad = _normal(param.shape, made.dtype, gradient)
    first = params[0].detach().clone()
    start += first.nbytes
    total = sum(param.numel() for param in params)
    before = torch.cuda.memory_allocated()
    optimizer = made.make(params)
    optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    timing = steady_ms(optimizer.step, steps, warmup=warmup)
    if not all(bool(param.isfinite().all()) for param in params):
        raise FloatingPointError("the step made parameters that are not finite")
    if torch.equal(params[0], first):
        raise RuntimeError("the step did not change the parameters")
    return optimizer, {
        **timing,
        "parameters": total,
        "state_bytes_per_parameter": (held - before) / total,
        "temporary_bytes": peak - held,
        "temporary_bytes_per_parameter": (peak - held) / total,
        "all_in_bytes_per_parameter": (peak - start) / total,
    }


def host_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state in host memory, step counters aside."""
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and not t.is_cuda and t.numel() > 1)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, std: float) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype).normal_(std=std)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", default=["64x16M"], choices=[*SIZES, "all"], help="default 64x16M")
    add_common_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    sizes = list(SIZES) if "all" in parsed.sizes else parsed.sizes
    session = Session(parsed, COLUMNS)
    for size in sizes:
        count, shape = SIZES[size]
        session.table(f"{size}: {count} tensors, {count * torch.Size(shape).numel() / 1e9:.2f} B parameters")
        needs = {name: optimizer.needs for name, optimizer in OPTIMIZERS.items()}
        session.everyone(needs, measure, count, shape, session.copy_rate, size=size)
    return 0
