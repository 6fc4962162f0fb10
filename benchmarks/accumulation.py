"""What the tensor cores' fast accumulation costs on the operands of a trained model, product by product.

    python -m benchmarks.accumulation                  train the 124M in FP8 for --steps, then look

One forward and backward pass over --rows held-out rows. Every FP8 product of the blocks is computed twice, with fast
and with full accumulation, in FP32: the difference in dB, and the part of the full result that is missing in the fast
one's projection on it (`benchmarks.gemm.error_of_fast`). The weights' gradients over the first so many tokens of the
pass, as their error grows with them. One row of results/accumulation.jsonl for each kind of product: the mean and worst
over layers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.common import RESULTS, append_row
from benchmarks.gemm import error_of_fast
from benchmarks.runs import BARE, CONFIG, scaled, shared_corpus, train
from overcoat.kernels.gemm import gemm
from overcoat.ops import products
from overcoat.train.data import make_batch
from overcoat.train.loss import summed_loss
from overcoat.train.state import TrainState

TOKENS = (8192, 16384, 32768)


class Comparison:
    """Stands in for `gemm` and remembers what fast accumulation changes, by kind of product."""

    def __init__(self) -> None:
        self.errors: dict[str, list[dict[str, float]]] = defaultdict(list)

    def gemm(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype,
        fast: bool, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compare, then multiply as asked."""
        if a.dtype == torch.float8_e4m3fn:
            self.compare("forward", a, b, scale_a, scale_b)
        elif self.in_wgrad:
            for tokens in TOKENS:
                if tokens <= a.shape[1]:
                    first, second = (operand[:, :tokens].contiguous() for operand in (a, b))
                    self.compare(f"wgrad, {tokens} tokens", first, second, scale_a, scale_b)
        else:
            self.compare("dgrad", a, b, scale_a, scale_b)
        return gemm(a, b, scale_a, scale_b, bias, dtype, fast, residual)

    in_wgrad = False

    def wgrad(self, original: Callable[..., Tensor], *args: Any) -> Tensor:
        """`products.wgrad`, known as such."""
        self.in_wgrad = True
        try:
            return original(*args)
        finally:
            self.in_wgrad = False

    def compare(self, kind: str, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
        """Both kinds of accumulation of one product."""
        fast, full = (gemm(a, b, scale_a, scale_b, None, torch.float32, way) for way in (True, False))
        self.errors[kind].append(error_of_fast(fast, full))

    def rows(self) -> list[dict[str, Any]]:
        """Mean and worst of each kind."""
        found = []
        for kind, errors in sorted(self.errors.items()):
            db, shrinks = ([error[name] for error in errors] for name in ("fast_db", "shrinks_by"))
            found.append(
                {
                    "product": kind,
                    "products": len(errors),
                    "db": {"mean": sum(db) / len(db), "worst": min(db)},
                    "shrinks_by": {"mean": sum(shrinks) / len(shrinks), "worst": max(shrinks, key=abs)},
                }
            )
        return found


def compare(run: Callable[[], None]) -> list[dict[str, Any]]:
    """`run`, a forward and backward pass, with every product compared."""
    from overcoat.ops import mlp

    comparison, original = Comparison(), products.wgrad

    def wgrad(*args: Any) -> Tensor:
        return comparison.wgrad(original, *args)

    with (
        mock.patch.object(products, "gemm", comparison.gemm),
        mock.patch.object(products, "wgrad", wgrad),
        mock.patch.object(mlp, "wgrad", wgrad),
    ):
        run()
    return comparison.rows()


def main() -> None:
    """Train, compare, print, append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of training, with the schedule stretched to it")
    parser.add_argument("--rows", type=int, default=32, help="held-out rows in the pass")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="more settings")
    parser.add_argument("--data", type=Path, help="where tokens are kept; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS / "accumulation.jsonl")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    found: list[dict[str, Any]] = []

    with tempfile.TemporaryDirectory() as folder:
        places = [f"train.run_dir={folder}", f"data.cache_dir={arguments.data or Path(folder) / 'data'}"]
        config = scaled(arguments.config, [*BARE, *arguments.set, *places], arguments.steps)
        corpus = shared_corpus(config, console)

        def visit(state: TrainState, _say: Callable[[str], None]) -> None:
            batch = make_batch(corpus.held_out[: arguments.rows], corpus.eos, document_mask=False).to(state.device)
            state.model.train()
            found[:] = compare(lambda: (summed_loss(state.model, batch) / batch.num_labels).backward())
            state.model.zero_grad(set_to_none=True)

        train(config, corpus, "FP8", console, visit)
    for row in found:
        db, shrinks = row["db"], row["shrinks_by"]
        print(
            f"{row['product']:20s} {row['products']:3d} products: {db['mean']:.1f} dB, worst {db['worst']:.1f}; "
            f"shrinks by {shrinks['mean']:.1e}, worst {shrinks['worst']:.1e}"
        )
        identity = {"model": arguments.config.name, "steps": arguments.steps, "rows": arguments.rows}
        append_row(arguments.out, {"benchmark": "accumulation", **identity, **row})


if __name__ == "__main__":
    main()
