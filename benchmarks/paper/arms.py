"""Trainings to be compared: the same model, tokens, order and seed under several recipes, by `overcoat train`; and how
many of a model's own answers are right, with the standard error."""

from __future__ import annotations

import copy
import functools
import io
import math
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.rows import Row
from overcoat.memory import use_expandable_segments
from overcoat.train.checkpoint import list_checkpoints
from overcoat.train.configfile import build_config
from overcoat.train.metrics import read_metrics
from overcoat.train.run import run
from overcoat.train.summary import summarize

BASELINE = "bf16"
# Settings of every arm: nothing but the training itself.
BARE = ["compare.overrides=[]", "sample.tokens=0", "train.tensorboard=false", "checkpoint.every=0"]
EXACT = ["optimizer.moments=fp32", "optimizer.master=bf16+16"]
ARMS = {
    BASELINE: ["recipe.name=bf16", *EXACT],
    "default": [],
    "paper": ["recipe.name=paper", "optimizer.moments=fp8"],
    "leanest": ["recipe.name=leanest"],
    "e4m3": ["recipe.grad_format=e4m3"],
    "block": ["recipe.linear_scaling=block"],
    # Which part of a difference comes from the layers, and which from the optimizer.
    "default-fp32": EXACT,
    "bf16-8bit": ["recipe.name=bf16"],
    "bf16-fp8": ["recipe.name=bf16", "optimizer.moments=fp8"],
    "bf16-head": ["recipe.name=bf16", "recipe.head=bf16", *EXACT],
}
CURVE_POINTS = 200
NUMBER = re.compile(r"answer is (-?\d+)")


def train(values: dict[str, Any], settings: list[str], run_dir: Path) -> Row:
    """Run `overcoat train` on nested `values` with `settings` to its end, or go on with it: the figures of
    results.json, what identifies the data, and both loss curves of metrics.jsonl by step."""
    use_expandable_segments()
    config = build_config(values, [*BARE, *settings, f"train.run_dir={run_dir}"])
    console = Console(file=io.StringIO())
    (figures,) = summarize(run(config, console), run_dir, console)["runs"]
    metrics = read_metrics(Path(figures["metrics"]))
    losses = {kind: {step: row["loss"] for step, row in metrics[kind].items()} for kind in ("train", "eval")}
    saved = torch.load(Path(figures["checkpoint"]) / "training.pt", map_location="cpu", weights_only=True, mmap=True)
    kept = {key: value for key, value in figures.items() if isinstance(value, (int, float))}
    curves = {"train_losses": curve(losses["train"]), "held_out_losses": losses["eval"]}
    return {"data": saved["data_identity"], **kept, **curves}


def curve(losses: Mapping[int, float]) -> dict[int, float]:
    """At most CURVE_POINTS means over neighbouring steps, each under its last step."""
    steps = list(losses)
    width = math.ceil(len(steps) / CURVE_POINTS)
    parts = [steps[first : first + width] for first in range(0, len(steps), width)]
    return {part[-1]: round(statistics.fmean(losses[step] for step in part), 4) for part in parts}


# ---- a small model, made on the spot: what `--size small` looks at in place of a real run ---------------------------

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
    """Return the newest checkpoint of a run directory, or the path itself if it is one. ValueError: there is none."""
    found = list_checkpoints(run_dir / "checkpoints") or [run_dir]
    if not (found[-1] / "training.pt").is_file():
        raise ValueError(f"--checkpoint {run_dir}: no run directory or checkpoint of `overcoat train`")
    return found[-1]


# ---- whether a model's own answers are right -------------------------------------------------------------------------


def completions(
    model: Any, tokenizer: Any, prompts: Sequence[str], tokens: int, rows: int, pixels: Tensor | None = None
) -> list[str]:
    """Return the model's greedy continuation of each prompt, at most `tokens` tokens; `rows` prompts at once. pixels:
    (prompts, C, height, width), the image of each."""
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))  # little padding
    found: dict[int, str] = {}
    tokenizer, stop = copy.deepcopy(tokenizer), tokenizer.eos_token_id
    tokenizer.pad_token = tokenizer.eos_token
    for first in range(0, len(order), rows):
        places = order[first : first + rows]
        asked = tokenizer([prompts[place] for place in places], padding=True, padding_side="left", return_tensors="pt")
        given = {name: asked[name].to(model.device) for name in ("input_ids", "attention_mask")}
        if pixels is not None:
            given["pixel_values"] = pixels[places]
        made = model.generate(**given, max_new_tokens=tokens, do_sample=False, pad_token_id=stop, eos_token_id=stop)
        texts = tokenizer.batch_decode(made[:, asked.input_ids.shape[1] :], skip_special_tokens=True)
        found |= dict(zip(places, texts, strict=True))
    return [found[place] for place in range(len(prompts))]


def number_of(text: str) -> int | None:
    """The number that a solution ends in; None: it names none."""
    found = NUMBER.findall(text)
    return int(found[0]) if found else None  # what comes after the first is another problem, which the model made up


def share(right: Sequence[bool]) -> tuple[float, float]:
    """The share of True in per cent, and its standard error."""
    mean = sum(right) / len(right)
    return 100 * mean, 100 * math.sqrt(mean * (1 - mean) / len(right))
