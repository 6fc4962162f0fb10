"""Loss of a linear head, forward and backward, ours and its peers in one run: `python -m benchmarks.loss`.

    overcoat          `linear_cross_entropy`: chunks by its own rule, fixed chunks, FP8 products
    liger             liger-kernel's fused linear cross-entropy (left out if it is not installed)
    torch chunked     `F.linear_cross_entropy` with its default options (PyTorch 2.13 and newer)
    torch             `F.cross_entropy` on FP32 logits, as transformers computes it, eager and compiled

Hidden and weight in BF16, one label in eight ignored. Reported: ms of forward and backward; TFLOP/s of the three
products; peak MiB above the inputs, both gradients included; SQNR in dB of the gradients against FP64, on 1024 tokens.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import RESULTS, append_row, copy_bandwidth, time_ms
from overcoat.ops.loss import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

HIDDEN = 4096
VOCABULARIES = (32000, 128256)
CHUNKS = (1024, 2048, 4096, 8192)
ACCURACY_TOKENS = 1024


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """transformers' ForCausalLMLoss on labels already shifted."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def contestants() -> Iterator[tuple[str, Loss]]:
    """Everyone who takes part: (hidden, weight, labels) -> mean loss."""
    yield "overcoat", linear_cross_entropy
    for chunk in CHUNKS:
        yield f"overcoat, {chunk} tokens", functools.partial(linear_cross_entropy, chunk_tokens=chunk)
    for fmt in ("e5m2", "e4m3"):
        yield f"overcoat FP8 {fmt}", functools.partial(linear_cross_entropy, fp8=fmt)
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()
        yield "liger", lambda hidden, weight, labels: fused(weight, hidden, labels)
    except ImportError as error:
        print(f"liger left out: {error}")
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()
        yield "torch chunked", functools.partial(F.linear_cross_entropy, options=options)
    else:
        print(f"torch chunked left out: torch {torch.__version__} has no F.linear_cross_entropy with chunks")
    yield "torch eager", plain
    yield "torch compiled", torch.compile(plain)


def inputs(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (T, H), weight (V, H), labels (T,): logits of standard deviation 2."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, HIDDEN, device="cuda") * (2 / HIDDEN**0.5)).bfloat16().requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    labels[::8] = -100
    return hidden, weight, labels


def measure(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, float]:
    """Time and peak memory of one forward and backward."""

    def step() -> None:
        hidden.grad = weight.grad = None
        loss(hidden, weight, labels).backward()

    step()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    timing = time_ms(step, repeats=10, warmup=1)
    flops = 6.0 * hidden.numel() * weight.shape[0]
    hidden.grad = weight.grad = None
    return {**timing, "TFLOP_per_s": flops / timing["ms"] / 1e9, "peak_bytes": peak}


def accuracy(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, float]:
    """SQNR in dB of both gradients against FP64, and the loss's error."""
    h, w = hidden.detach().double(), weight.detach().double()
    real = labels != -100
    x = h @ w.t()
    exact = F.cross_entropy(x, labels)
    p = torch.softmax(x, 1)
    p[real] = p[real].scatter_add(1, labels[real, None], torch.full_like(p[real][:, :1], -1.0))
    p *= real[:, None] / real.sum()
    value = loss(hidden, weight, labels)
    dhidden, dweight = torch.autograd.grad(value, (hidden, weight))
    return {
        "loss_error": (value.double() - exact).item(),
        "dhidden_db": _sqnr(p @ w, dhidden),
        "dweight_db": _sqnr(p.t() @ h, dweight),
    }


def _sqnr(truth: Tensor, got: Tensor) -> float:
    noise = (got.double() - truth).square().sum()
    return 10 * math.log10(truth.square().sum() / noise) if noise > 0 else math.inf


def run(tokens: int, vocabulary: int) -> dict[str, dict[str, Any]]:
    """Measure everyone on one size and print the table."""
    given = inputs(tokens, vocabulary)
    few = inputs(ACCURACY_TOKENS, vocabulary)
    print(f"\nT {tokens}, H {HIDDEN}, V {vocabulary}")
    print(f"{'':26s} {'ms':>8s} {'TFLOP/s':>8s} {'peak MiB':>9s} {'loss error':>10s} {'dhidden':>8s} {'dweight':>8s}")
    rows: dict[str, dict[str, Any]] = {}
    for name, loss in contestants():
        try:
            row = rows[name] = {**measure(loss, *given), **accuracy(loss, *few)}
        except torch.cuda.OutOfMemoryError:
            rows[name] = {"error": "out of memory"}
            print(f"{name:26s} out of memory")
            continue
        print(
            f"{name:26s} {row['ms']:8.2f} {row['TFLOP_per_s']:8.0f} {row['peak_bytes'] / 2**20:9.0f} "
            f"{row['loss_error']:10.1e} {row['dhidden_db']:8.1f} {row['dweight_db']:8.1f}",
            flush=True,
        )
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Run the sizes, append one row to benchmarks/results/loss.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabularies", nargs="*", type=int, default=list(VOCABULARIES))
    parser.add_argument("--out", type=Path, default=RESULTS / "loss.jsonl")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"copy_bandwidth": copy_bandwidth(), "tokens": arguments.tokens, "hidden": HIDDEN}
    figures["vocabularies"] = {str(v): run(arguments.tokens, v) for v in arguments.vocabularies}
    append_row(arguments.out, figures)


if __name__ == "__main__":
    main()
