"""Training the 124M Llama in FP8 and in BF16, same seed and tokens: losses, tokens per second, memory.

    python -m benchmarks.training [section.key=value ...]      overrides apply to every run

One row of benchmarks/results/training.jsonl: every run of `RUNS`, and its held-out loss against the first one's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.common import RESULTS, append_row
from overcoat.train.configfile import load_config
from overcoat.train.run import run_once

CONFIG = Path(__file__).parents[1] / "configs" / "llama-124m.toml"
RUNS = {
    "BF16, FP32 moments": ["recipe.name=bf16", "optimizer.moments=fp32", "optimizer.master=bf16+16"],
    "Recipe(), FP8 moments": ["optimizer.moments=fp8"],
    "Recipe(), 8bit moments": [],
}
FIGURES = ("held_out_loss", "train_loss", "tokens_per_second", "peak_bytes", "kept_bytes", "optimizer_bytes")


def main() -> None:
    """Run them all on the tokens that the first one makes."""
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for index, (title, changes) in enumerate(RUNS.items()):
            places = [f"train.run_dir={folder}/{index}", f"data.cache_dir={folder}/data"]
            result = run_once(load_config(CONFIG, [*sys.argv[1:], *changes, *places]), console, title)
            runs[title] = {name: getattr(result, name) for name in FIGURES}
        baseline = next(iter(runs.values()))["held_out_loss"]
        for title, figures in runs.items():
            figures["held_out_gap"] = figures["held_out_loss"] - baseline
            console.print(title, figures)
        append_row(
            RESULTS / "training.jsonl",
            {"parameters": result.num_parameters, "tokens": result.num_tokens, "runs": runs},
        )


if __name__ == "__main__":
    main()
