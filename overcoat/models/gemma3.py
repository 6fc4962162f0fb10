"""Gemma 3, its language model: Gemma 2 without caps, with norms of q and k, and a rotation for each kind of window."""

from __future__ import annotations

from overcoat.models.family import Family
from overcoat.models.gemma2 import sandwich

FAMILY = Family(
    module="transformers.models.gemma3.modeling_gemma3",
    layer="Gemma3DecoderLayer",
    causal="Gemma3ForCausalLM",
    norm="Gemma3RMSNorm",
    plus_one=True,
    branches=sandwich,
    samples={"gemma3": {"head_dim": 64, "sliding_window": 24, "query_pre_attn_scalar": 128}},
)
