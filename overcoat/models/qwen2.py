"""Qwen 2 and 2.5: Llama with biases of q, k and v."""

from __future__ import annotations

from overcoat.models.family import Family
from overcoat.models.llama import branches

FAMILY = Family(
    module="transformers.models.qwen2.modeling_qwen2",
    layer="Qwen2DecoderLayer",
    causal="Qwen2ForCausalLM",
    norm="Qwen2RMSNorm",
    branches=branches,
    samples={"qwen2": {}},
)
