"""Qwen 3 with experts, which run as they are; a layer may have an MLP instead."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import as_it_is, attention, gated_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + experts(norm(x))."""
    norm = layer.post_attention_layernorm
    is_mlp = type(layer.mlp).__name__ == "Qwen3MoeMLP"
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm),
        gated_mlp(layer.mlp, pre=norm) if is_mlp else as_it_is(layer.mlp, pre=norm),
    )


FAMILY = Family(
    module="transformers.models.qwen3_moe.modeling_qwen3_moe",
    layer="Qwen3MoeDecoderLayer",
    causal="Qwen3MoeForCausalLM",
    norm="Qwen3MoeRMSNorm",
    branches=branches,
    samples={
        "qwen3_moe": {
            "head_dim": 64,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "mlp_only_layers": [1],
        }
    },
)
