"""one step of Muon on the matrices of Llama-2-7B's layers and on 1,000 small ones: ours, peers, the products' bound.

    ms           median of whole steps one right after the other
    state, temp. bytes per parameter, as for the other optimizers
    TFLOP        of the products, symmetric ones counted as half
    bound        ms that these take at the rate of one large FP16 GEMM of cuBLAS, measured in the same process
    of bound     step over bound
    of copy      of rows "passes": the time of a copy of the bytes that momentum, norm and weights move, over theirs

Rows "passes" replace Newton-Schulz by nothing: what is left is bound by memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.optimizer import Optimizer, peer, step_figures
from benchmarks.rows import Column, Row, decimals, percent
from benchmarks.session import Session, add_common_arguments
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
LAYER: dict[tuple[int, ...], int] = {(4096, 4096): 4, (11008, 4096): 2, (4096, 11008): 1}
SMALL: dict[tuple[int, ...], int] = {(1024, 1024): 1000}
# Bytes per parameter that the passes of "8bit" with "bf16+8" move: gradient, codes both ways, u; its norm; u to FP16;
# result, weight and remainder both ways. The check for finite gradients reads them once more.
TRAFFIC = (2 + 2.03 + 2) + 2 + 4 + (2 + 4 + 2) + 2


def ours(**options: Any) -> Optimizer:
    return Optimizer(lambda params: Muon([{"params": params, "algorithm": "muon"}], lr=LR, **options))


SDNQ: dict[str, Any] = {
    "use_quantized_buffers": True,
    "use_stochastic_buffers": True,
    "use_gram_ns": True,
    "use_torch_compile": True,
}
ADV: dict[str, Any] = {"use_muon": True, "state_precision": "int8_sr"}
ALONE = "overcoat muon 8bit, passes"  # without Newton-Schulz
OPTIMIZERS = {
    "overcoat muon 8bit": ours(),
    ALONE: ours(),
    "overcoat muon fp8": ours(state="fp8"),
    "overcoat muon fp32": ours(state="fp32"),
    "torch muon BF16": peer("torch.optim", "Muon", lr=LR),
    "torch muon FP32": peer("torch.optim", "Muon", torch.float32, lr=LR),
    "reference muon BF16": peer("muon", "SingleDeviceMuon", lr=LR),
    "reference muon FP32": peer("muon", "SingleDeviceMuon", torch.float32, lr=LR),
    "SDNQ muon uint8": peer("sdnq.optim", "Muon", lr=LR, **SDNQ),
    "SDNQ muon uint8, INT8 products": peer("sdnq.optim", "Muon", lr=LR, use_quantized_matmul=True, **SDNQ),
    "adv_optm muon int8": peer("adv_optm", "Muon_adv", lr=LR, **ADV),
    "adv_optm muon int8, compile": peer("adv_optm", "Muon_adv", lr=LR, compiled_optimizer=True, **ADV),
}


def measure(name: str, shapes: dict[tuple[int, ...], int], copy_rate: float) -> Row:
    """Time and memory of one contestant on fresh parameters; `copy_rate` in bytes per second."""
    if name == ALONE:
        kernels.orthogonalize = lambda updates, steps: kernels.normalize(updates)
    _, found = step_figures(OPTIMIZERS[name], shapes, 1e-3, STEPS, warmup=1)
    if name == ALONE:
        return {**found, "share": TRAFFIC * found["parameters"] / copy_rate / found["ms"] * 1e3}
    flops = sum(kernels.flops(shape[0], shape[1], 5) * count for shape, count in shapes.items())
    bound = flops / gemm_rate() * 1e3
    return {**found, "flops": flops, "bound_ms": bound, "of_bound": found["ms"] / bound}


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=8, help="of Llama-2-7B (default 8; all are 32)")
    add_common_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    session = Session(parsed, PRODUCT_COLUMNS)
    session.table("products of Newton-Schulz")
    session.everyone(dict.fromkeys(PRODUCTS, ()), measure_product)
    layers = {shape: count * parsed.layers for shape, count in LAYER.items()}
    needs = {name: optimizer.needs for name, optimizer in OPTIMIZERS.items()}
    for title, shapes in ((f"{parsed.layers} layers of Llama-2-7B", layers), ("1,000 of 1024 x 1024", SMALL)):
        session.table(title, COLUMNS)
        session.everyone(needs, measure, shapes, session.copy_rate, size=title)
    return 0
