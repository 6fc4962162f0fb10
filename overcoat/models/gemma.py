"""Gemma: Llama with norms that multiply by 1 + weight, and GELU as the gate's activation."""

from __future__ import annotations

from overcoat.models.family import Family
from overcoat.models.llama import branches

FAMILY = Family(
    module="transformers.models.gemma.modeling_gemma",
    layer="GemmaDecoderLayer",
    causal="GemmaForCausalLM",
    norm="GemmaRMSNorm",
    plus_one=True,
    branches=branches,
    samples={"gemma": {"head_dim": 64}},
)
