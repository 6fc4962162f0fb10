"""OLMo: Llama with LayerNorms that have no weights, and q, k and v limited to +- clip_qkv if that is given."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""
    clip = float(layer.self_attn.config.clip_qkv or 0.0)
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm, clip=clip),
        gated_mlp(layer.mlp, pre=layer.post_attention_layernorm),
    )


FAMILY = Family(
    module="transformers.models.olmo.modeling_olmo",
    layer="OlmoDecoderLayer",
    causal="OlmoForCausalLM",
    norm="OlmoLayerNorm",
    centered=True,
    branches=branches,
    samples={"olmo": {"clip_qkv": 0.4}},
)
