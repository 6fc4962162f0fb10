"""Cohere 2 (Command R7B, A): Cohere with windows (as the mask); the layers without one do not rotate."""

from __future__ import annotations

from typing import Any

from overcoat.models import cohere
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    return cohere.branches(layer, batch, rotates=layer.self_attn.sliding_window is not None)


FAMILY = Family(
    module="transformers.models.cohere2.modeling_cohere2",
    layer="Cohere2DecoderLayer",
    causal="Cohere2ForCausalLM",
    norm="Cohere2LayerNorm",
    centered=True,
    parallel=lambda layer: True,
    branches=branches,
    logit_scale=lambda model: float(model.logit_scale),
    samples={"cohere2": {"bos_token_id": 1, "eos_token_id": 2, "sliding_window": 24}},
)
