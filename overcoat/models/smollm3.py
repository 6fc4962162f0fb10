"""SmolLM3: Llama whose every fourth layer does not rotate q and k."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""
    rotates = bool(layer.self_attn.use_rope)
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm, rotates=rotates),
        gated_mlp(layer.mlp, pre=layer.post_attention_layernorm),
    )


FAMILY = Family(
    module="transformers.models.smollm3.modeling_smollm3",
    layer="SmolLM3DecoderLayer",
    causal="SmolLM3ForCausalLM",
    norm="SmolLM3RMSNorm",
    branches=branches,
    samples={"smollm3": {"pad_token_id": 0}},
)
