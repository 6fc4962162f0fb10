"""How far weights go beside an outlier, by every format of AdamW's moments, in units of FP32 AdamW's way.

    python -m benchmarks.outliers [--out FILE]        a minute on one GPU, some on a CPU; appends rows, "outliers"

A group of 128 gradients, one of which is larger than the others by a ratio of 1 to 1e6.

    steady        all are constant. The mean way of the 127 over `--steps` steps, and the least and most of one of them
    alternating   the 127 change their sign at every step, the outlier never does. In learning rates: how far the one
                  that goes farthest comes within `--alternating` steps; FP32's go 1.8 in the first steps
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import RESULTS, append_row
from overcoat import AdamW

# "8bit" first, "fp32" last: the measure.
MOMENTS: dict[str, Any] = {"8bit": "8bit", "fp8": "fp8", "sqrt8 log8": ("sqrt8", "log8"), "fp32": "fp32"}
SIZE = 128


def gradients(exponents: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """(constant gradients, their factors of every second step), both (R, 128): the first of a row is the outlier."""
    grad = (1e-2 / 10**exponents)[:, None].repeat(1, SIZE)
    grad[:, 0] = 1e-2
    turned = torch.ones_like(grad)
    turned[:, 1:] = -1.0
    return grad.to(device), turned.to(device)


def optimizer_of(moments: Any, rows: int, beta2: float, device: str) -> tuple[Tensor, AdamW]:
    """A weight of zeros, (R, 128), and what steps it."""
    weight = torch.nn.Parameter(torch.zeros(rows, SIZE, device=device))
    options: dict[str, Any] = {"betas": (0.9, beta2), "weight_decay": 0.0, "check_finite": False}
    return weight, AdamW([weight], lr=1.0, moments=moments, **options)


def steady_way(moments: Any, exponents: Tensor, beta2: float, steps: int, device: str) -> Tensor:
    """The way of each neighbour, FP64 (R, 127)."""
    weight, optimizer = optimizer_of(moments, len(exponents), beta2, device)
    weight.grad, _ = gradients(exponents, device)
    for _ in range(steps):
        optimizer.step()
    return weight.detach()[:, 1:].double().cpu()


def alternating_way(moments: Any, exponents: Tensor, beta2: float, steps: int, device: str) -> Tensor:
    """The farthest that a neighbour comes, FP64 (R,)."""
    weight, optimizer = optimizer_of(moments, len(exponents), beta2, device)
    weight.grad, turned = gradients(exponents, device)
    spread = torch.exp2(torch.rand(weight.shape, generator=torch.Generator().manual_seed(0))).to(device)
    weight.grad[:, 1:] *= spread[:, 1:]
    farthest = torch.zeros(len(exponents), dtype=torch.float64)
    for _ in range(steps):
        optimizer.step()
        weight.grad *= turned
        farthest = torch.maximum(farthest, weight.detach()[:, 1:].abs().amax(1).double().cpu())
    return farthest


def measure(beta2: float, steps: int, alternating: int, device: str) -> list[dict[str, Any]]:
    """A row for each format."""
    exponents, coarse = torch.linspace(0, 6, 49), torch.arange(7.0)
    exact = steady_way("fp32", exponents, beta2, steps, device)
    rows = []
    for name, moments in MOMENTS.items():
        share = steady_way(moments, exponents, beta2, steps, device) / exact
        figures = {"mean": share.mean(1), "least": share.amin(1), "most": share.amax(1)}
        steady = {kind: [round(float(x), 4) for x in values] for kind, values in figures.items()}
        farthest = alternating_way(moments, coarse, beta2, alternating, device)
        row: dict[str, Any] = {"benchmark": "outliers", "moments": name, "beta2": beta2, "device": device}
        row |= {"steps": steps, "log10_ratio": exponents.tolist(), "steady": steady}
        row |= {"alternating_steps": alternating, "alternating": [round(float(x), 2) for x in farthest]}
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure, print a line and append a row for each format and beta2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--alternating", type=int, default=4000)
    parser.add_argument("--out", type=Path, default=RESULTS / "outliers.jsonl")
    arguments = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for beta2 in (0.999, 0.95):
        for row in measure(beta2, arguments.steps, arguments.alternating, device):
            append_row(arguments.out, row)
            mean = row["steady"]["mean"]
            print(
                f"beta2 {beta2}: {row['moments']:10s} way {min(mean):.3f} to {max(mean):.3f}, alternating "
                + " ".join(f"{x:.1f}" for x in row["alternating"]),
                flush=True,
            )


if __name__ == "__main__":
    main()
