"""Gradients where attention's scores are large: what Overcoat's 12-bit q and k cost.

    python -m benchmarks scores --against 9683458

Models of two layers get query and key weights scaled until their largest score is the one wanted. Such models are
chaotic, BF16 itself is far from FP32, so errors of all gradients against FP32 are compared, over seeds:

    bf16            the model as it is, in BF16
    attention-bf16  converted, attention kept in BF16
    default         converted with `Recipe()`; old: the same of another revision
    mean, worst     default's error by attention-bf16's: of the means over seeds, and of one seed

A row is a family and a score.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import overcoat
from benchmarks.rows import append_row
from benchmarks.turns import load_revision

SCORES = (20.0, 180.0, 700.0, 1000.0, 5000.0, 30000.0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILIES = ("Llama", "Qwen2", "Qwen3")
LENGTH = 512
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def make_model(family: str, seed: int) -> nn.Module:
    """Two layers, FP32, grouped queries, norm weights that are not one."""
    torch.manual_seed(seed)
    config = getattr(transformers, family + "Config")(**SIZES)
    model = getattr(transformers, family + "ForCausalLM")._from_config(config, dtype=torch.float32).to(DEVICE).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1, 0.1)
    return model


def largest_score(model: nn.Module, ids: Tensor) -> float:
    """Of all layers, as transformers computes them."""
    found, original = [0.0], F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (q.float() @ keys.float().transpose(-1, -2) * (rest.get("scale") or q.shape[-1] ** -0.5)).tril()
        found.append(float(scores.abs().max()))
        return original(q, k, v, **rest)

    F.scaled_dot_product_attention = watched  # type: ignore[assignment]
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        F.scaled_dot_product_attention = original
    return max(found)


def plant(model: nn.Module, ids: Tensor, score: float) -> float:
    """Scale the weights before the scores until the largest is about `score`; returns the largest."""
    weights = dict(model.named_parameters())
    names = [name for name in weights if "q_norm" in name or "k_norm" in name]
    names = names or [name for name in weights if "q_proj" in name or "k_proj" in name]
    for _ in range(4):  # a layer's scores depend on those of the layer before
        factor = (score / largest_score(model, ids)) ** 0.5
        with torch.no_grad():
            for name in names:
                weights[name].mul_(factor)
    return largest_score(model, ids)


def gradients(model: nn.Module, ids: Tensor) -> Tensor:
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def errors(family: str, score: float, seed: int, packages: dict[str, Any]) -> dict[str, float]:
    """Relative errors of all gradients against FP32, and the largest score."""
    model = make_model(family, seed)
    ids = torch.randint(1024, (2, LENGTH), device=DEVICE)
    found = {"largest": plant(model, ids, score)}
    model.bfloat16()
    truth = gradients(copy.deepcopy(model).float(), ids)
    new = packages["new"]
    recipes = {"bf16": None, "attention-bf16": (new, new.Recipe(kept_attention="bf16")), "default": (new, new.Recipe())}
    if "old" in packages:
        recipes["old"] = packages["old"], packages["old"].Recipe()
    for name, converted in recipes.items():
        mine = copy.deepcopy(model)
        if converted is not None:
            converted[0].convert(mine, converted[1])
        found[name] = float((gradients(mine, ids) - truth).norm() / truth.norm())
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", metavar="REVISION", help="git revision, or a folder that holds overcoat/, beside")
    parser.add_argument("--seeds", type=int, default=8)


def run(parsed: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        packages = {"new": overcoat}
        if parsed.against:
            packages["old"] = load_revision(parsed.against, Path(folder))
        for family, score in itertools.product(FAMILIES, SCORES):
            found = [errors(family, score, seed, packages) for seed in range(parsed.seeds)]
            means = {name: statistics.fmean(each[name] for each in found) for name in found[0]}
            row = {"benchmark": "scores", "family": family, "score": score, "seeds": parsed.seeds, **means}
            for name in {"default", "old"} & means.keys():
                row[f"{name}_mean"] = means[name] / means["attention-bf16"]
                row[f"{name}_worst"] = max(each[name] / each["attention-bf16"] for each in found)
            append_row(parsed.json, row)
            print({name: f"{v:.3g}" if isinstance(v, float) else v for name, v in row.items()}, flush=True)
    return 0
