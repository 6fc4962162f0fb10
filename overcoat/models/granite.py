"""Granite: Llama with multipliers of attention's scores, of the branches, the embedding and the logits.

The first is attention's scale. A branch's is part of its last product's scale; the embedding's is not the layers'; the
logits' is read by the head.
"""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + m * attention(norm(x)); x = x + m * mlp(norm(x))."""
    scale = float(layer.residual_multiplier)
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm, scale=scale),
        gated_mlp(layer.mlp, pre=layer.post_attention_layernorm, scale=scale),
    )


FAMILY = Family(
    module="transformers.models.granite.modeling_granite",
    layer="GraniteDecoderLayer",
    causal="GraniteForCausalLM",
    norm="GraniteRMSNorm",
    branches=branches,
    logit_scale=lambda model: 1.0 / model.config.logits_scaling,
    samples={
        "granite": {
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.3,
            "embedding_multiplier": 6.0,
            "logits_scaling": 0.7,
        },
        "granite-biases": {"attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.3},
    },
)
