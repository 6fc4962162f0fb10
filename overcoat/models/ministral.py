"""Ministral: Llama with sliding windows, which arrive as the mask."""

from __future__ import annotations

from overcoat.models.family import Family
from overcoat.models.llama import branches

FAMILY = Family(
    module="transformers.models.ministral.modeling_ministral",
    layer="MinistralDecoderLayer",
    causal="MinistralForCausalLM",
    norm="MinistralRMSNorm",
    branches=branches,
    samples={"ministral": {"sliding_window": 24, "head_dim": 64}},
)
