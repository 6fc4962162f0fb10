"""A small trained model, made on the spot: what `--size small` looks at in place of a real run."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from overcoat.paper.arms import EXACT, train

# About 0.6 million parameters on a part of Python's own source: seconds on two cores.
TINY: dict[str, Any] = {
    "model": {"config": {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }},
    "tokenizer": {"vocab_size": 512},
    "data": {"files": ["stdlib"], "max_bytes": 300_000, "sequence_length": 128},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup_steps": 5},
    "train": {"steps": 30, "batch_size": 4},
}  # fmt: skip


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()  # until the process ends


@functools.cache
def tiny_run() -> Path:
    """The run directory of the model, trained in BF16 with FP32 moments once a process."""
    run_dir = Path(_folder().name) / "tiny"
    train(TINY, ["recipe.name=bf16", *EXACT], run_dir)
    return run_dir


def newest_checkpoint(run_dir: Path) -> Path:
    """Of a run directory, or the path itself if it is a checkpoint. ValueError: there is none."""
    found = sorted(run_dir.glob("checkpoints/step-*")) or [run_dir]
    if not (found[-1] / "training.pt").is_file():
        raise ValueError(f"--checkpoint {run_dir}: no run directory or checkpoint of `overcoat train`")
    return found[-1]
