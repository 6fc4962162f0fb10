"""What centering v and o is for: gradients of attention where the tokens' values have a vector in common.

    python -m benchmarks.shared_vector             a minute on two CPU cores

q, k, v and the gradient of o are Gaussian; to each token's v the same Gaussian vector is added, so many times as large.
SQNR of dq, dk, dv against those from exact q, k, v, o in FP32, with parts of them centered before they are coded. One
row of results/activations.jsonl.

Such a vector adds the same to all logits' gradients of a row, do . v, and to do . o, which is taken off them: it
cancels, and what coding loses of it does not.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.activation_probes import Kept, attention_errors
from benchmarks.common import RESULTS, append_row
from overcoat.ops.attention import Heads, Rotary

SIZES = (0.0, 0.3, 1.0, 3.0, 10.0)
WAYS = {name: Kept("sqrt8", name.replace(" ", "")) for name in ("q k", "q k v", "q k o", "q k v o")}
BATCH, SEQUENCE, HEADS, WIDTH = 2, 512, 4, 128


def errors(size: float, seed: int = 0) -> dict[str, dict[str, float]]:
    """SQNR in dB of dq, dk and dv by what is centered, with a vector of `size` times v's deviation in all v."""
    generator = torch.Generator().manual_seed(seed)
    tokens, columns = BATCH * SEQUENCE, HEADS * WIDTH
    q, k, v, do = (torch.randn(tokens, columns, generator=generator) for _ in range(4))
    v += size * torch.randn(columns, generator=generator)
    angle = torch.outer(torch.arange(SEQUENCE), 10_000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)).repeat(1, 2)
    heads = Heads(BATCH, HEADS, HEADS, WIDTH, WIDTH**-0.5)
    return attention_errors((q, k, v), do, Rotary(angle.cos(), angle.sin()), heads, WAYS)


def main(argv: list[str] | None = None) -> None:
    """Measure every size and append the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "activations.jsonl")
    out = parser.parse_args(argv).out
    found = {str(size): errors(size) for size in SIZES}
    for size, ways in found.items():
        for name, figures in ways.items():
            print(f"{size:>5} {name:8s} " + ", ".join(f"{part} {value:.1f}" for part, value in figures.items()))
    append_row(out, {"benchmark": "activations", "kind": "shared vector", "sqnr": found})


if __name__ == "__main__":
    main()
