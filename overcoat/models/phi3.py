"""Phi-3, Phi-4: Llama with q, k, v in one layer, gate and up in another; of Phi-4 mini's heads a part rotates."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp, rotated_columns
from overcoat.models.family import Family, Modules

PARTIAL = {"rope_type": "default", "rope_theta": 10000.0}


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""
    of_scores, mlp = layer.self_attn, layer.mlp
    rotated = rotated_columns(of_scores, of_scores.head_dim)
    return (
        attention(of_scores, batch, pre=layer.input_layernorm, into=(of_scores.qkv_proj,), rotated=rotated),
        gated_mlp(mlp, layer.config.hidden_act, pre=layer.post_attention_layernorm, into=(mlp.gate_up_proj,)),
    )


FAMILY = Family(
    module="transformers.models.phi3.modeling_phi3",
    layer="Phi3DecoderLayer",
    causal="Phi3ForCausalLM",
    norm="Phi3RMSNorm",
    branches=branches,
    samples={
        "phi3": {"sliding_window": 24, "pad_token_id": 0},
        "phi4-mini": {"pad_token_id": 0, "rope_parameters": PARTIAL | {"partial_rotary_factor": 0.75}},
    },
)
