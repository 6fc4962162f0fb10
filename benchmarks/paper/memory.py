"""Tables 2, 6 and 7: bytes kept by op, a block's time and memory, whole models' memory and speed.

Bytes come of `overcoat estimate`'s dry runs, on any machine; times of the benchmarks' measurements, on a GPU.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.contestants import OVERCOAT, PAPER
from benchmarks.layer import measure as measure_layer
from benchmarks.model import Work
from benchmarks.model import measure as measure_model
from benchmarks.rows import Result, Row
from benchmarks.session import call_alone
from benchmarks.shapes import BlockShape
from overcoat.estimate.predict import Predictor
from overcoat.estimate.setup import Setup
from overcoat.models.shapes import MODELS, Model
from overcoat.recipe import Recipe

BASELINE = Setup(recipe=Recipe.bf16(), moments="fp32", master="bf16+16")
SETUPS = {"bf16": BASELINE, "paper": Setup(recipe=Recipe.paper(), moments="fp8"), "default": Setup()}
# What an op of the memory report is in the paper's table: by the end of its name.
PARTS = {
    "norms": ("input", "layernorm"),
    "activation": ("mlp", "act_fn"),
    "attention": ("attention", "self_attn"),
    "linear": ("proj", "output"),
}
TABLE2 = {
    "BF16, the paper's": (4, 8, 5, 5.66, 22.66),
    "Transformer Engine, the paper's": (2, 8, 5, 3.33, 18.33),
    "COAT, the paper's": (1, 4, 5, 3.33, 13.33),
}
# Contestants: how many times less than BF16 they keep, in the paper; (hidden, sequence): ms on its H100.
KEEP = {"bf16 eager": 1.0, "transformer engine current": 1.20, PAPER: 1.65, OVERCOAT: 1.65}
TABLE6: dict[tuple[int, int], tuple[float | None, ...]] = {
    (2048, 2048): (11.83, 8.28, 8.04, None),
    (2048, 4096): (24.12, 17.23, 16.71, None),
    (4096, 2048): (26.55, 17.98, 16.85, None),
    (4096, 4096): (54.80, 37.24, 35.6, None),
}
# (model, GPUs, batch): GB at peak of BF16, Transformer Engine and COAT, and COAT's tokens per second and GPU.
TABLE7 = {
    ("llama-2-7b", 1, 1): (None, None, 79.3, 5906),
    ("llama-2-7b", 4, 2): (55.1, 51.1, 35.6, 11257),
    ("llama-2-7b", 8, 2): (41.2, 37.2, 27.0, 11241),
    ("llama-2-13b", 4, 1): (76.1, 73.0, 49.1, None),
    ("llama-2-13b", 8, 1): (49.4, 46.5, 32.5, None),
    ("llama-30b", 8, 1): (None, None, 70.5, 1363),
}


def kept_units(model: Model, batch: int, sequence: int, setup: Setup) -> dict[str, float]:
    """U that one block keeps, by part and in all."""
    config = model.changed(num_hidden_layers=1).config()
    units: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    unit = batch * sequence * config.hidden_size * 2
    for op, size in Predictor(config).kept(batch, sequence, setup).by_op().items():
        part = next((part for part, ends in PARTS.items() if op.endswith(ends)), None)
        if part is not None and (not op.startswith("model.") or ".layers." in op):
            units[part] += size / unit
    units["total"] = sum(units.values())
    return {part: round(size, 4) for part, size in units.items()}  # scales alone, a few bytes, are 0


def table2(options: argparse.Namespace) -> Result:
    """Bytes that a block keeps, by op; dry runs."""
    columns = (*PARTS, "total")
    rows: list[Row] = [{"name": name, **dict(zip(columns, figures, strict=True))} for name, figures in TABLE2.items()]
    # The paper counts with an MLP of 8/3 times the hidden width.
    model = MODELS["llama-2-7b"].changed(intermediate_size=10928)
    names = {"bf16": "BF16, ours (Hugging Face, eager)", "paper": "paper's recipe, ours", "default": "default, ours"}
    rows += [{"name": names[key], **kept_units(model, 4, 2048, setup)} for key, setup in SETUPS.items()]
    notes = (
        "U = tokens x hidden x 2 bytes; the paper's RoPE (2) counts with attention (3). Ours saves a norm's output",
        "once, for the norm and the GEMM behind it, and recomputes the activation's; Hugging Face's norms save FP32.",
    )
    return "Table 2: kept for the backward by one block, U", rows, columns, notes


def table6(options: argparse.Namespace) -> Result:
    """Kept bytes of a block by dry runs; its time with --full, on a GPU."""
    if options.full and not torch.cuda.is_available():
        raise ValueError("table6 --full needs an NVIDIA GPU")
    columns = (*(("paper ms", "ours ms") if options.full else ()), "paper kept x", "ours kept x")
    rows: list[Row] = []
    for (hidden, sequence), times in list(TABLE6.items())[: None if options.full else 1]:
        model = MODELS["coat-1b" if hidden == 2048 else "llama-2-7b"]
        kept = {key: kept_units(model, 4, sequence, setup)["total"] for key, setup in SETUPS.items()}
        mine = {"bf16 eager": kept["bf16"], PAPER: kept["paper"], OVERCOAT: kept["default"]}
        for (name, less), of_paper in zip(KEEP.items(), times, strict=True):
            row: Row = {"name": f"{hidden}, {sequence}: {name}", "paper ms": of_paper, "paper kept x": less}
            row["ours kept x"] = kept["bf16"] / mine[name] if name in mine else None
            if options.full:
                found = call_alone(measure_layer, name, BlockShape(model, 4, sequence), timeout=300.0)
                row["ours ms"] = found.get("total_ms", found.get("error"))
            rows.append(row)
    notes = ("kept x: how many times less than BF16 keeps. `benchmarks layer` has all shapes and peers.",)
    return "Table 6: one block, forward and backward, and what it keeps", rows, columns, notes


def table7(options: argparse.Namespace) -> Result:
    """Peaks of whole models by the estimate (docs/research/memory.md says how far off); speed on a GPU."""
    columns = ("paper BF16 GB", "paper TE GB", "paper COAT GB", "ours GB", "ours BF16 GB")
    rows: list[Row] = []
    for (name, gpus, batch), (*of_paper, speed) in list(TABLE7.items())[: None if options.full else 1]:
        predictor = Predictor(MODELS[name].config())
        both = [predictor.predict(batch, 2048, setup, gpus).peak_bytes / 1e9 for setup in (Setup(), BASELINE)]
        row: Row = dict(zip(columns, (*of_paper, *both), strict=True))
        rows.append({"name": f"{name}, {gpus} GPUs, batch {batch}", **row, "paper COAT tok/s": speed})
        if gpus == 1 and torch.cuda.is_available():
            found = call_alone(measure_model, OVERCOAT, Work(MODELS[name], batch, 2048), 10, timeout=400.0)
            rows[-1]["ours tok/s"] = found.get("tokens_per_second", found.get("error"))
    notes = (
        "Peaks by `overcoat estimate`; BF16 has FP32 moments and weights. Tokens/s: on a GPU, of what one GPU holds;",
        "several GPUs: torchrun ... overcoat train (docs/many-gpus.md).",
    )
    return "Table 7: whole training steps", rows, (*columns, "paper COAT tok/s", "ours tok/s"), notes
