"""Starcoder 2: LayerNorm, biases, a sliding window (which arrives as the mask), an MLP with GELU and without gate."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, plain_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + c_proj(gelu(c_fc(norm(x))))."""
    mlp, config = layer.mlp, layer.self_attn.config
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm),
        plain_mlp(mlp, mlp.c_fc, mlp.c_proj, config.hidden_act, pre=layer.post_attention_layernorm),
    )


FAMILY = Family(
    module="transformers.models.starcoder2.modeling_starcoder2",
    layer="Starcoder2DecoderLayer",
    causal="Starcoder2ForCausalLM",
    norm=None,
    branches=branches,
    samples={"starcoder2": {"sliding_window": 24}},
)
