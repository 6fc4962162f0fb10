"""Mistral: Llama with a sliding window, which arrives as the mask."""

from __future__ import annotations

from overcoat.models.family import Family
from overcoat.models.llama import branches

FAMILY = Family(
    module="transformers.models.mistral.modeling_mistral",
    layer="MistralDecoderLayer",
    causal="MistralForCausalLM",
    norm="MistralRMSNorm",
    branches=branches,
    samples={"mistral": {"sliding_window": 24, "head_dim": 64}},
)
