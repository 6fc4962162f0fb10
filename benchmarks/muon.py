"""Muon's steps on the matrices of Llama-2-7B's layers, ours and torch's, and the products that bound them.

    ms           median of whole steps one right after the other
    state, temp. bytes per parameter, as for the other optimizers
    TFLOP        of the products, symmetric ones counted as half
    bound        ms that these take at the rate of one large FP16 GEMM of cuBLAS, measured in the same process
    of bound     step over bound
    of copy      of rows "passes": the time of a copy of the bytes that momentum, norm and weights move, over theirs

Rows "passes" replace Newton-Schulz by nothing: what is left is bound by memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.rows import Column, Row, decimals, percent
from benchmarks.timing import steady_ms, time_ms
from overcoat.kernels import muon as kernels
from overcoat.optim.muon import Muon

LR, STEPS = 1e-3, 5
COLUMNS = (
    Column("ms", "ms", decimals(2)),
    Column("state B", "state_bytes_per_parameter", decimals(3)),
    Column("temp. B", "temporary_bytes_per_parameter", decimals(3)),
    Column("temp. GB", "temporary_bytes", decimals(3, 1e-9)),
    Column("TFLOP", "flops", decimals(2, 1e-12)),
    Column("bound ms", "bound_ms", decimals(2)),
    Column("of bound", "of_bound", decimals(3)),
    Column("of copy", "share", percent),
)
PRODUCT_COLUMNS = (Column("ms", "ms", decimals(3)), Column("TFLOP/s", "flops_per_second", decimals(0, 1e-12)))
# Of one layer of Llama-2-7B: shape and how often.
LAYER = {(4096, 4096): 4, (11008, 4096): 2, (4096, 11008): 1}
SMALL = {(1024, 1024): 1000}
# Bytes per parameter that the passes of "8bit" with "bf16+8" move: gradient, codes both ways, u; its norm; u to FP16;
# result, weight and remainder both ways. The check for finite gradients reads them once more.
TRAFFIC = (2 + 2.03 + 2) + 2 + 4 + (2 + 4 + 2) + 2


class Contestant(NamedTuple):
    make: Callable[[list[torch.nn.Parameter]], Any]
    dtype: torch.dtype = torch.bfloat16
    alone: bool = False  # without Newton-Schulz


def ours(**options: Any) -> Callable[[list[torch.nn.Parameter]], Any]:
    return lambda params: Muon([{"params": params, "algorithm": "muon"}], lr=LR, **options)


def torchs(params: list[torch.nn.Parameter]) -> Any:
    return importlib.import_module("torch.optim").Muon(params, lr=LR)


CONTESTANTS = {
    "overcoat muon 8bit": Contestant(ours()),
    "overcoat muon 8bit, passes": Contestant(ours(), alone=True),
    "overcoat muon fp8": Contestant(ours(state="fp8")),
    "overcoat muon fp32": Contestant(ours(state="fp32")),
    "torch muon BF16": Contestant(torchs),
    "torch muon FP32": Contestant(torchs, torch.float32),
}


def measure(name: str, shapes: dict[tuple[int, int], int], copy_rate: float) -> Row:
    """Time and memory of one contestant on fresh parameters; `copy_rate` in bytes per second."""
    made = CONTESTANTS[name]
    torch.manual_seed(0)
    params = [
        torch.nn.Parameter(torch.empty(shape, device="cuda", dtype=made.dtype).normal_(std=0.02))
        for shape, count in shapes.items()
        for _ in range(count)
    ]
    for param in params:
        param.grad = torch.empty_like(param).normal_(std=1e-3)
    first, total = params[0].detach().clone(), sum(param.numel() for param in params)
    before = torch.cuda.memory_allocated()
    optimizer = made.make(params)
    if made.alone:
        kernels.orthogonalize = lambda updates, steps: kernels.normalize(updates)
    optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    temporary = torch.cuda.max_memory_allocated() - held
    timing = steady_ms(optimizer.step, STEPS, warmup=1)
    if not all(bool(param.isfinite().all()) for param in params) or torch.equal(params[0], first):
        raise FloatingPointError("the step made parameters that are not finite, or changed nothing")
    found: Row = {
        **timing,
        "parameters": total,
        "state_bytes_per_parameter": (held - before) / total,
        "temporary_bytes_per_parameter": temporary / total,
        "temporary_bytes": temporary,
    }
    if made.alone:
        return {**found, "share": TRAFFIC * total / copy_rate / timing["ms"] * 1e3}
    flops = sum(kernels.flops(*shape, 5) * count for shape, count in shapes.items())
    bound = flops / gemm_rate() * 1e3
    return {**found, "flops": flops, "bound_ms": bound, "of_bound": timing["ms"] / bound}


def gemm_rate() -> float:
    """Return the FLOP/s of one large FP16 GEMM of cuBLAS, warm."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    return 2 * 8192**3 / steady_ms(lambda: a @ b, 5, 10)["ms"] * 1e3


# Name: (rows, columns of x, the product, FLOP for rows n and columns m of x).
PRODUCTS: dict[str, tuple[int, int, Callable[[Tensor], Any], Callable[[int, int], int]]] = {
    "x x^T": (4096, 11008, lambda x: kernels.product(x, x, True), lambda n, m: n * n * m),
    "x^T x": (11008, 4096, lambda x: kernels.product(x.mT, x.mT, True), lambda n, m: n * m * m),
    "G^2": (4096, 4096, lambda x: kernels.product(x, x, True), lambda n, m: n * n * m),
    "P(G)": (
        4096, 4096, lambda x: kernels.product(x, x, True, added=x, beta=1.0, gamma=1.0), lambda n, m: n * n * m,
    ),
    "x x^T, cuBLAS, all tiles": (4096, 11008, lambda x: x @ x.mT, lambda n, m: 2 * n * n * m),
    "G^2, cuBLAS, all tiles": (4096, 4096, lambda x: x @ x, lambda n, m: 2 * n * n * m),
    "x x^T, 2048": (2048, 5632, lambda x: kernels.product(x, x, True), lambda n, m: n * n * m),
    "x x^T, 16 of 1024": (1024, 1024, lambda x: kernels.product(x, x, True), lambda n, m: 16 * n * n * m),
    "G x, 16 of 1024": (1024, 1024, lambda x: kernels.product(x, x.mT), lambda n, m: 32 * n * n * m),
    "G x, 16 of 1024, cuBLAS": (1024, 1024, lambda x: x @ x, lambda n, m: 32 * n * n * m),
}  # fmt: skip


def measure_product(name: str) -> Row:
    """Time of one product."""
    rows, columns, function, flops = PRODUCTS[name]
    count = 16 if "16 of" in name else 1
    x = torch.randn(count, rows, columns, device="cuda").div_(100).half()
    timing = time_ms(lambda: function(x), 20)
    return {**timing, "flops_per_second": flops(rows, columns) / timing["ms"] * 1e3}
