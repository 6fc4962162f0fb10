"""Qwen 3: Llama with a norm of each head of q and k."""

from __future__ import annotations

from overcoat.models.family import Family
from overcoat.models.llama import branches

FAMILY = Family(
    module="transformers.models.qwen3.modeling_qwen3",
    layer="Qwen3DecoderLayer",
    causal="Qwen3ForCausalLM",
    norm="Qwen3RMSNorm",
    branches=branches,
    samples={"qwen3": {"head_dim": 64}},
)
