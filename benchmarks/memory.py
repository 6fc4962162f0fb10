"""Predicted and measured peak memory of whole training steps on one GPU.

    python -m benchmarks memory                        every case of CASES
    python -m benchmarks memory --only 7b leanest      cases with both words in their name
    python -m benchmarks memory --configs              configs/*.toml, with random weights and tokens

Two steps each; the second one, whose optimizer states exist from the start, is measured. A row is a case: bytes
predicted and measured, peaks by kind of phase, what the allocator reserved, and what of the GPU lies outside it.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import overcoat
from benchmarks.rows import ROOT, append_row
from benchmarks.session import attempt
from overcoat import Recipe
from overcoat.estimate.phases import Phase, kind_of, measure_step
from overcoat.estimate.predict import Predictor
from overcoat.estimate.setup import Setup
from overcoat.memory import use_expandable_segments
from overcoat.models.shapes import MODELS
from overcoat.train.batch_plan import training
from overcoat.train.configfile import load_config


class Case(NamedTuple):
    """A training step: transformers configuration, batch, sequence, setup."""

    name: str
    config: Any
    batch: int
    sequence: int
    setup: Setup


LEANEST, RELEASED = Setup(Recipe.leanest()), Setup(Recipe.leanest(), release_gradients=True)
BASELINE = Setup(Recipe.bf16(), moments="fp32", master="bf16+16")
FP8_HEAD = Setup(Recipe(head="fp8"), accumulation=2)
# (name, model and perhaps its layers, batch, sequence, setup)
CASES: tuple[tuple[str, str, int, int, Setup], ...] = (
    ("124m", "124m", 32, 1024, Setup()),
    ("124m bf16, fp32 states", "124m", 32, 1024, BASELINE),
    ("124m paper", "124m", 8, 1024, Setup(Recipe.paper(), moments="fp8")),
    ("olmo-1b", "olmo-1b", 8, 2048, Setup()),
    ("olmo-1b leanest", "olmo-1b", 16, 2048, LEANEST),
    ("olmo-1b bf16 attention, released", "olmo-1b", 8, 4096, replace(RELEASED, recipe=Recipe(kept_attention="bf16"))),
    ("7b 8 layers, logits", "llama-2-7b 8", 4, 2048, Setup(Recipe(head=None))),
    ("7b 8 layers, fp8 head, accumulation", "llama-2-7b 8", 4, 2048, FP8_HEAD),
    ("7b 8 layers, block scales", "llama-2-7b 8", 8, 2048, Setup(Recipe(linear_scaling="block"))),
    ("7b 8 layers, bf16", "llama-2-7b 8", 4, 2048, BASELINE),
    ("llama-3-8b 8 layers", "llama-3-8b 8", 8, 2048, Setup()),
    ("qwen2.5-7b 8 layers", "qwen2.5-7b 8", 8, 2048, Setup()),
    ("llama-30b 6 layers, leanest", "llama-30b 6", 4, 2048, replace(LEANEST, master="bf16")),
    ("7b", "llama-2-7b", 4, 2048, Setup()),
    ("7b batch 1", "llama-2-7b", 1, 2048, Setup()),
    ("7b batch 1, accumulation", "llama-2-7b", 1, 2048, Setup(accumulation=2)),
    ("7b batch 1, leanest, accumulation", "llama-2-7b", 1, 2048, replace(LEANEST, accumulation=2)),
    ("7b batch 16, released", "llama-2-7b", 16, 2048, Setup(release_gradients=True)),
    ("7b batch 1, leanest, released, bf16 weights", "llama-2-7b", 1, 2048, replace(RELEASED, master="bf16")),
    ("7b batch 1, leanest, released, offload", "llama-2-7b", 1, 2048, replace(RELEASED, offload=True)),
)


def cases() -> Iterator[Case]:
    """`CASES` with their configurations."""
    for name, model, batch, sequence, setup in CASES:
        key, _, layers = model.partition(" ")
        shape = MODELS[key].changed(num_hidden_layers=int(layers)) if layers else MODELS[key]
        yield Case(name, shape.config(), batch, sequence, setup)


def config_cases() -> Iterator[Case]:
    """The shipped training configurations, but those on images, which the estimate does not know."""
    for path in sorted((ROOT / "configs").glob("*.toml")):
        config = load_config(path)
        if path.stem not in ("demo", "llama-124m") and not config.data.images:
            asked = training(config)
            yield Case(f"configs/{path.name}", asked.predictor.config, asked.batch, asked.sequence, asked.setup)


def measure(case: Case) -> dict[str, Any]:
    """Predicted and measured bytes of a step, and their relative difference."""
    prediction = Predictor(case.config).predict(case.batch, case.sequence, case.setup)
    phases = measured_step(case, "cuda")
    reserved = torch.cuda.memory_reserved()
    fullest = max(phases, key=lambda phase: phase.peak)
    free, total = torch.cuda.mem_get_info()
    return {
        "parameters": prediction.parameters,
        "batch": case.batch,
        "sequence": case.sequence,
        "predicted": prediction.peak_bytes,
        "measured": fullest.peak,
        "difference": prediction.peak_bytes / fullest.peak - 1,
        "predicted_moment": prediction.moment,
        "measured_moment": fullest.label,
        "components": prediction.components,
        "predicted_peaks": peaks(prediction.phases),
        "measured_peaks": peaks(phases),
        "reserved": reserved,
        "outside": total - free - reserved,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF", ""),
    }


def measured_step(case: Case, device: str) -> list[Phase]:
    """Phases of the second step of a model with random weights."""
    from transformers import AutoModelForCausalLM

    setup = case.setup
    options: dict[str, Any] = {"dtype": setup.torch_dtype, "attn_implementation": "sdpa"}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(case.config, **options).train()
    overcoat.convert(model, setup.recipe)
    options = {**setup.group, "offload": setup.offload, "offload_buffer": setup.offload_buffer}
    optimizer = overcoat.AdamW(model.parameters(), lr=1e-5, **options)
    if setup.release_gradients:
        overcoat.release_gradients(model, optimizer)
    clip = None if setup.release_gradients else 1.0

    def step() -> None:
        for _ in range(setup.accumulation):
            ids = torch.randint(case.config.vocab_size, (case.batch, case.sequence), device=device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / setup.accumulation).backward()
        optimizer.step(clip_grad_norm=clip)
        optimizer.zero_grad()

    step()
    with measure_step(model, optimizer) as phases:
        step()
    return phases


def peaks(phases: list[Phase]) -> dict[str, int]:
    """The most bytes in any phase of each kind."""
    kinds = dict.fromkeys(kind_of(phase.label) for phase in phases)
    return {kind: max(phase.peak for phase in phases if kind_of(phase.label) == kind) for kind in kinds}


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    if "error" in row:
        return f"{row['case']:46s} {row['error']}"
    sizes = (f"{key} {row[key] / 2**30:.2f} GiB" for key in ("predicted", "measured", "reserved", "outside"))
    moments = f"{row['predicted_moment']} / {row['measured_moment']}"
    return f"{row['case']:46s} {', '.join(sizes)}, {row['difference']:+.2%}, {moments}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases whose names hold all these words")
    parser.add_argument("--configs", action="store_true", help="measure configs/*.toml instead")


def run(parsed: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise ValueError(f"needs an NVIDIA GPU, and PyTorch {torch.__version__} sees none")
    use_expandable_segments()  # as `overcoat train` does
    for case in config_cases() if parsed.configs else cases():
        if all(word in case.name for word in parsed.only):
            torch._C._cuda_clearCublasWorkspaces()  # those of the case before are not this one's
            row = {"case": case.name, **attempt(measure, case)}
            print(line(row), flush=True)
            append_row(parsed.json, row)
            gc.collect()  # model, hook and released optimizer hold each other
            torch.cuda.empty_cache()
    return 0
