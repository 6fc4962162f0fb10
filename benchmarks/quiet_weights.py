"""Weights whose gradients stop, seldom come, or are small beside their neighbours': how far AdamW moves them.

    python -m benchmarks.quiet_weights                          "8bit" and "fp8" beside FP32 moments, on the CPU
    python -m benchmarks.quiet_weights --moments 8bit --out quiet.jsonl

A moment's code has a smallest step. Where a group's maximum is large, the m of a quiet weight is a few such steps, and
a code that rounds 0.9 m back to m keeps it while v goes to zero: the weight walks off. Each case trains 32 x 128
weights, one group a row, with the same gradients twice, and compares the quiet ones: `way`, the norm of where they have
got to, in units of FP32's; `largest`, the largest step in units of lr, and FP32's. And the error of m's code alone,
1e4 * sum (m' - m)^2 / sum m^2 of Gaussian values, rounded as a step rounds them.

Rows of benchmarks/results/quiet.jsonl. docs/optimizer-states.md has them as a table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import overcoat
from benchmarks.common import RESULTS, append_row
from overcoat.formats.moments import MOMENT_CODES, decode_first, encode_first, resolve_moments

SHAPE, LR, BETAS, SCALE = (32, 128), 1e-3, (0.9, 0.95), 1e-4
STOPS_AT = 41  # steps with gradient


class Case(NamedTuple):
    """gradient(step, generator) of the weights, of which the columns `quiet` are compared; how many steps."""

    quiet: Tensor
    gradient: Callable[[int, torch.Generator], Tensor]
    steps: int


def _noise(generator: torch.Generator) -> Tensor:
    return torch.randn(SHAPE, generator=generator) * SCALE


def cases(generator: torch.Generator) -> dict[str, Case]:
    """All cases by name; `generator` draws what stays the same in all steps."""
    some, signs = torch.arange(SHAPE[1]) % 8 == 0, torch.randn(SHAPE, generator=generator).sign()
    constant, signal = signs * SCALE, 0.1 * torch.randn(SHAPE, generator=generator)
    rest = torch.arange(SHAPE[1]) > 0

    def stops(grad: Tensor, step: int) -> Tensor:
        return torch.where(some, 0.0, grad) if step >= STOPS_AT else grad

    def seldom(step: int, generator: torch.Generator) -> Tensor:
        grad, comes = _noise(generator), torch.rand(SHAPE, generator=generator) < 0.002
        return torch.where(some & ~comes, 0.0, grad)

    def beside(ratio: float) -> Callable[[int, torch.Generator], Tensor]:
        def gradient(step: int, generator: torch.Generator) -> Tensor:
            grad = (torch.randn(SHAPE, generator=generator) + signal) * SCALE / ratio
            return torch.where(rest, grad, ratio * grad)

        return gradient

    found = {
        "stops beside constant gradients": Case(some, lambda step, _: stops(constant, step), 500),
        "stops beside noise": Case(some, lambda step, generator: stops(_noise(generator), step), 500),
        "comes in 0.2% of the steps": Case(some, seldom, 800),
    }
    for ratio in (100, 300, 1000, 4000):
        found[f"{ratio} times smaller than one neighbour's"] = Case(rest, beside(ratio), 300)
    return found


def train(case: Case, moments: str, seed: int) -> tuple[Tensor, float]:
    """Where the quiet weights have got to from zero, and their largest step after 50, in units of lr."""
    weights = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = overcoat.AdamW([weights], lr=LR, betas=BETAS, weight_decay=0.0, moments=moments)
    generator, largest = torch.Generator().manual_seed(seed), 0.0
    for step in range(case.steps):
        before = weights.detach().clone()
        weights.grad = case.gradient(step, generator)
        optimizer.step()
        if step > 50:
            largest = max(largest, float((weights.detach() - before)[:, case.quiet].abs().max()) / LR)
    return weights.detach()[:, case.quiet], largest


def error_of_first(moments: str) -> float:
    """1e4 times the relative square error of m's code on Gaussian values."""
    code, generator = MOMENT_CODES[resolve_moments(moments)[0]], torch.Generator().manual_seed(0)
    m = torch.randn(400, 4, 128, generator=generator)
    random = torch.randint(-(2**31), 2**31, m.shape[:2], generator=generator).to(torch.int32)
    decoded = decode_first(encode_first(m, code, random), code)
    return 1e4 * float((decoded - m).square().sum() / m.square().sum())


def measure(moments: str, seed: int) -> dict[str, Any]:
    """The row of one pair of codes."""
    row: dict[str, Any] = {"benchmark": "quiet weights", "moments": moments, "seed": seed, "cases": {}}
    row["error_of_first"] = error_of_first(moments)
    for name, case in cases(torch.Generator().manual_seed(seed)).items():
        (ours, step), (exact, exact_step) = (train(case, each, seed + 1) for each in (moments, "fp32"))
        way = float(ours.norm() / exact.norm())
        row["cases"][name] = {"way": way, "largest": step, "largest_fp32": exact_step}
        print(f"{moments:6s} {name:40s} way {way:8.3f}, largest step {step:6.2f} (FP32 {exact_step:.2f})", flush=True)
    print(f"{moments:6s} error of m's code 1e-4 * {row['error_of_first']:.3f}")
    return row


def main() -> None:
    """Measure, print and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", nargs="+", default=["8bit", "fp8"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "quiet.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for moments in arguments.moments:
        append_row(arguments.out, measure(moments, arguments.seed))


if __name__ == "__main__":
    main()
