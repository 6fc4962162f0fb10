"""Gemma 3, its language model: Gemma 2 without caps, with norms of q and k, and a rotation for each kind of window."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x)))."""
    config = layer.self_attn.config
    return (
        attention(
            layer.self_attn,
            batch,
            pre=layer.input_layernorm,
            post=layer.post_attention_layernorm,
        ),
        gated_mlp(
            layer.mlp,
            config.hidden_activation,
            pre=layer.pre_feedforward_layernorm,
            post=layer.post_feedforward_layernorm,
        ),
    )


FAMILY = Family(
    module="transformers.models.gemma3.modeling_gemma3",
    layer="Gemma3DecoderLayer",
    causal="Gemma3ForCausalLM",
    norm="Gemma3RMSNorm",
    plus_one=True,
    branches=branches,
    samples={"gemma3": {"head_dim": 64, "sliding_window": 24, "query_pre_attn_scalar": 128}},
)
