"""Which of cuBLASLt's kernels is fastest on a hot GPU, product by product; the constants of `gpu/gemm_tiles.py`.

    python -m benchmarks.gemm                            the products of all block shapes
    python -m benchmarks.gemm --shapes 7b-s2048 13b      of these
    python -m benchmarks.gemm --fit                      the constants from the rows there are, without a GPU

Operands are normal numbers in FP8. For each product of a block, a row of results/gemm.jsonl: us of `torch._scaled_mm`,
of our op, and of each kernel that cuBLASLt offers. They run one after another for `--seconds` each, forth and back, of
which the first 40% is not counted, so that the GPU is as hot as in training all the time. wgrad with fast and with full
accumulation: the error of the fast one against the full, in dB, and by what part it shrinks the result; so for other
numbers of tokens, and for gradients and inputs with a mean of half their deviation, whose sums grow faster. The last
row is the host's: us of Python for a product that takes the GPU no time.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import RESULTS, append_row
from overcoat.bench.shapes import BLOCKS, BlockShape
from overcoat.formats import E4M3, E5M2, quantize_tensor
from overcoat.kernels.gemm import gemm
from overcoat.kernels.gemm_tiles import TILES, relative_time

SECONDS = 0.2
H200_MULTIPROCESSORS = 132


class Product(NamedTuple):
    """D (rows, columns) = A @ B^T over `inner`; A in E5M2 where it is a gradient."""

    name: str
    rows: int
    columns: int
    inner: int
    fast: bool = True

    @property
    def is_forward(self) -> bool:
        return self.name.startswith("forward")


def products(shape: BlockShape) -> list[Product]:
    """All FP8 products of a block."""
    model, tokens = shape.model, shape.tokens
    qkv = model.head_dim * (model.heads + 2 * model.kv_heads)
    layers = {
        "q k v": (qkv, model.hidden),
        "out": (model.hidden, model.hidden),
        "gate up": (2 * model.intermediate, model.hidden),
        "down": (model.hidden, model.intermediate),
    }
    forward = [Product(f"forward {name}", tokens, n, k) for name, (n, k) in layers.items()]
    dgrad = [Product(f"dgrad {name}", tokens, k, n) for name, (n, k) in layers.items()]
    wgrad = [Product(f"wgrad {name}", n, k, tokens, fast) for name, (n, k) in layers.items() for fast in (True, False)]
    return [*forward, *dgrad, *wgrad]


# ---- measuring -------------------------------------------------------------------------------------------------------


def window_us(function: Callable[[], Any], seconds: float) -> float:
    """us a call in the last 60% of `seconds` of calls."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    for _ in range(3):
        function()
    events[1].record()
    torch.cuda.synchronize()
    count = max(5, int(seconds * 1e3 / (events[0].elapsed_time(events[1]) / 3)))
    for _ in range(2 * count // 5):
        function()
    counted = count - 2 * count // 5
    events[1].record()
    for _ in range(counted):
        function()
    events[2].record()
    torch.cuda.synchronize()
    return events[1].elapsed_time(events[2]) * 1e3 / counted


def hot_us(functions: dict[Any, Callable[[], Any]], seconds: float) -> dict[Any, float]:
    """us of each, the mean of a window on the way forth and one on the way back."""
    names = list(functions)
    window_us(functions[names[0]], 2 * seconds)
    times: dict[Any, float] = dict.fromkeys(names, 0.0)
    for name in (*names, *reversed(names)):
        times[name] += window_us(functions[name], seconds) / 2
    return times


def measure(product: Product, seconds: float) -> dict[str, Any]:
    """The row of a product."""
    from overcoat.kernels import cublaslt

    name, rows, columns, inner, fast = product
    a = quantize_tensor(torch.randn(rows, inner, device="cuda"), E4M3 if product.is_forward else E5M2)
    b = quantize_tensor(torch.randn(columns, inner, device="cuda"), E4M3)
    operands = (a.data, b.data, a.scale, b.scale)

    def by_torch(fast: bool = fast) -> Tensor:
        return torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale, out_dtype=torch.bfloat16, use_fast_accum=fast)

    plan = cublaslt.Plan(
        cublaslt.Problem(
            a.data.get_device(),
            rows,
            columns,
            inner,
            a.data.dtype,
            b.data.dtype,
            torch.bfloat16,
            fast,
            False,
            False,
            256,
        )
    )
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")

    def by_offer(place: int) -> None:
        plan.algorithm, plan.workspace = cublaslt.byref(plan.offers[place].algorithm), plan.offers[place].workspace
        plan.run(*operands, None, out, out)

    functions: dict[Any, Callable[[], Any]] = {
        "torch": by_torch,
        "overcoat": lambda: gemm(*operands, None, torch.bfloat16, fast),
        **{place: functools.partial(by_offer, place) for place in range(len(plan.offers))},
    }
    times = hot_us(functions, seconds)
    offers = [
        {"tile": tile, "cluster": cluster, "us": times[place]} for place, (tile, cluster) in enumerate(plan.kinds)
    ]
    row = {"product": name, "rows": rows, "columns": columns, "inner": inner, "fast": fast}
    row |= {"torch_us": times["torch"], "us": times["overcoat"], "chosen": plan.place, "offers": offers}
    if fast and name.startswith("wgrad"):
        row |= error_of_fast(by_torch(True).float(), by_torch(False).float())
    return row


def error_of_fast(fast: Tensor, full: Tensor) -> dict[str, float]:
    """SQNR in dB, and the part of the full result that is missing in the fast one's projection on it."""
    power = full.square().sum()
    noise = (full - fast).square().sum()
    return {"fast_db": 10 * torch.log10(power / noise).item(), "shrinks_by": 1 - ((fast * full).sum() / power).item()}


def accumulation(tokens: int, mean: float, hidden: int = 4096) -> dict[str, Any]:
    """`error_of_fast` for a weight's gradient (hidden, hidden) over so many tokens; mean: of both operands."""
    parts = [quantize_tensor(torch.randn(hidden, tokens, device="cuda") + mean, fmt) for fmt in (E5M2, E4M3)]
    (dy, dy_scale), (x, x_scale) = parts
    fast, full = (gemm(dy, x, dy_scale, x_scale, None, torch.float32, fast) for fast in (True, False))
    return {"tokens": tokens, "mean": mean, **error_of_fast(fast, full)}


def host_us(calls: int = 2000) -> dict[str, float]:
    """us of the host for a product of 64 x 64 x 64."""
    a = quantize_tensor(torch.randn(64, 64, device="cuda"), E4M3)

    def by_torch() -> Tensor:
        return torch._scaled_mm(a.data, a.data.t(), a.scale, a.scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    times = {}
    with torch.no_grad():
        for name, function in {
            "torch": by_torch,
            "overcoat": lambda: gemm(a.data, a.data, a.scale, a.scale, None, torch.bfloat16, True),
        }.items():
            laps = []
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(calls // 5):
                    function()
                laps.append((time.perf_counter() - start) * 1e6 / (calls // 5))
            times[name] = float(np.median(laps))
    return times


def text(row: dict[str, Any]) -> str:
    """A row as a line."""
    flops = 2e-6 * row["rows"] * row["columns"] * row["inner"]
    offers = sorted(row["offers"], key=lambda offer: offer["us"])
    listed = " ".join(f"{offer['tile']}/{offer['cluster']}:{offer['us']:.0f}" for offer in offers)
    error = f" {row['fast_db']:.1f} dB, shrinks by {row['shrinks_by']:.1e}" if "fast_db" in row else ""
    return (
        f"{row['product']:16s} {'fast' if row['fast'] else 'full'} torch {row['torch_us']:8.1f} us, "
        f"ours {row['us']:8.1f} ({row['us'] / row['torch_us'] - 1:+6.1%}, {flops / row['us']:.0f} TFLOP/s), "
        f"best {offers[0]['us']:8.1f}; {listed}{error}"
    )


# ---- the constants ---------------------------------------------------------------------------------------------------


def fit(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, int], tuple[float, float]]:
    """per_product and per_tile of `TILES`, relative to the first, by least squares of log(us / (waves * area)).

    Each product has its own constant, since GPUs and clocks differ between rows. To first order in both numbers.
    """
    keys, points = list(TILES), []
    fast = [row for row in rows if row.get("fast")]
    for number, row in enumerate(fast):
        size = row["rows"], row["columns"], row["inner"]
        for offer in row["offers"]:
            key = offer["tile"], offer["cluster"]
            if key in TILES:
                bare = relative_time(TILES[key]._replace(per_product=1.0, per_tile=0.0), *size, H200_MULTIPROCESSORS)
                points.append((number, keys.index(key), 4096 / size[2], math.log(offer["us"] / bare)))
    matrix = np.zeros((len(points), 2 * len(keys) - 2 + len(fast)))
    for line, (number, place, length, _) in zip(matrix, points, strict=True):
        line[2 * len(keys) - 2 + number] = 1.0
        if place:
            line[2 * place - 2], line[2 * place - 1] = 1.0, length
    solution = np.linalg.lstsq(matrix, np.array([point[3] for point in points]), rcond=None)[0]
    found = {keys[0]: (1.0, 0.0)}
    for place, key in enumerate(keys[1:]):
        found[key] = (math.exp(solution[2 * place]), float(solution[2 * place + 1]))
    return found


def main() -> None:
    """Measure and append the rows, or fit the constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(BLOCKS), choices=list(BLOCKS), metavar="SHAPE")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "gemm.jsonl")
    arguments = parser.parse_args()
    if arguments.fit:
        rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
        for key, (per_product, per_tile) in fit(rows).items():
            print(f"{key}: {per_product:.3f}, {per_tile:+.3f}; now {TILES[key][-2:]}")
        return
    for shape in arguments.shapes:
        print(f"\n{shape}", flush=True)
        for product in products(BLOCKS[shape]):
            row = measure(product, arguments.seconds)
            print(text(row), flush=True)
            append_row(arguments.out, {"benchmark": "gemm", "shape": shape, **row})
    for tokens in (2048, 8192, 16384, 32768, 65536):
        for mean in (0.0, 0.5):
            row = accumulation(tokens, mean)
            error = f"{row['fast_db']:.1f} dB, shrinks by {row['shrinks_by']:.1e}"
            print(f"fast accumulation over {tokens} tokens, mean {mean}: {error}")
            append_row(arguments.out, {"benchmark": "gemm", **row})
    times = host_us()
    print(f"\nhost: torch {times['torch']:.1f} us a product, ours {times['overcoat']:.1f}")
    append_row(arguments.out, {"benchmark": "gemm", "host_us": times})


if __name__ == "__main__":
    main()
