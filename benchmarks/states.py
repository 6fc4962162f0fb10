"""What each code of AdamW's moments loses on the moments of a real run.

    overcoat train configs/llama-124m.toml recipe.name=bf16 optimizer.moments=fp32 optimizer.master=bf16+16 \\
        compare.overrides=[] train.run_dir=runs/fp32                    train with FP32 moments
    python -m benchmarks.states runs/fp32/checkpoints/step-00000640     encode and decode them in every code

AdamW moves a weight by r = m / (sqrt(v) + eps), so that is where an error counts. With r' from the decoded moments,
over all parameters:

    error = 1e4 * sum (r' - r)^2 / sum r^2

Codes are rounded as a step rounds them. Prints a table, rows codes of m, columns codes of v, and appends one row to
results/states.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import RESULTS, append_row
from overcoat.formats import to_groups
from overcoat.formats.moments import MOMENT_CODES, decode_first, decode_second, encode_first, encode_second

GROUP_SIZE = 128
CHUNK = 1 << 16  # groups encoded at once
FIRST = ("e4m3", "e4m3x", "e5m2", "e5m2x", "de8", "de8x", "sqrt8", "bf16", "fp32")
SECOND = ("e4m3", "e4m3x", "e5m2", "e5m2x", "de8", "de8x", "log8", "bf16", "fp32")


def groups_of(checkpoint: Path, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(m, v) of each parameter in a checkpoint of `overcoat train`, FP32 groups (1, N, 128) in chunks.

    Raises:
        ValueError: the moments of the checkpoint are already coded.
    """
    saved = torch.load(checkpoint / "training.pt", map_location="cpu", mmap=True)["optimizer"]["state"]
    for state in saved.values():
        moments = state["exp_avg"], state["exp_avg_sq"]
        if any(moment.dtype != torch.float32 for moment in moments):
            raise ValueError(f"{checkpoint}: moments are {moments[0].dtype}; train with optimizer.moments=fp32")
        m, v = (to_groups(x.to(device).reshape(x.shape[0], -1), GROUP_SIZE).view(1, -1, GROUP_SIZE) for x in moments)
        yield from zip(m.split(CHUNK, 1), v.split(CHUNK, 1), strict=True)


def errors(m: Tensor, v: Tensor, eps: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of r^2, and of (r' - r)^2 for each pair of codes, named "m v"; 0-d FP64."""
    generator = torch.Generator(m.device).manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, m.shape[:2], generator=generator, device=m.device).int()
    first, second = {}, {}
    for name in FIRST:
        first[name] = decode_first(encode_first(m, MOMENT_CODES[name], bits), MOMENT_CODES[name]).float()
    for name in SECOND:
        decoded = decode_second(encode_second(v, MOMENT_CODES[name], bits), MOMENT_CODES[name]).float()
        second[name] = 1.0 / (decoded.sqrt() + eps)
    ratio = m / (v.sqrt() + eps)
    found = {
        f"{a} {b}": (first[a] * second[b] - ratio).square().sum(dtype=torch.float64) for a in FIRST for b in SECOND
    }
    return ratio.square().sum(dtype=torch.float64), found


def analyse(checkpoint: Path, eps: float, device: str) -> dict[str, float]:
    """The relative error of each pair of codes over all parameters of a checkpoint."""
    reference, total = 0.0, {f"{a} {b}": 0.0 for a in FIRST for b in SECOND}
    for m, v in groups_of(checkpoint, device):
        part, found = errors(m, v, eps)
        reference += float(part)
        for pair, value in found.items():
            total[pair] += float(value)
    return {pair: 1e4 * value / reference for pair, value in total.items()}


def main(argv: list[str] | None = None) -> None:
    """Analyse a checkpoint, print the table and append the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--out", type=Path, default=RESULTS / "states.jsonl")
    arguments = parser.parse_args(argv)
    found = analyse(arguments.checkpoint, arguments.eps, "cuda" if torch.cuda.is_available() else "cpu")
    append_row(arguments.out, {"benchmark": "states", "kind": "checkpoint", "errors": found})
    print("| m, v | " + " | ".join(SECOND) + " |", "|---|" + "---:|" * len(SECOND), sep="\n")
    for a in FIRST:
        print(f"| {a} | " + " | ".join(f"{found[f'{a} {b}']:.3g}" for b in SECOND) + " |")


if __name__ == "__main__":
    main()
