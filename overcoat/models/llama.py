"""Llama: RMSNorm and attention with rotary embedding, RMSNorm and SwiGLU.

The shape that most others share, and the shortest example of a family.
"""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm),
        gated_mlp(layer.mlp, pre=layer.post_attention_layernorm),
    )


FAMILY = Family(
    module="transformers.models.llama.modeling_llama",
    layer="LlamaDecoderLayer",
    causal="LlamaForCausalLM",
    norm="LlamaRMSNorm",
    branches=branches,
    samples={"llama": {}, "llama-biases": {"attention_bias": True, "mlp_bias": True}},
)
