"""Llama: RMSNorm and attention with rotary embedding, RMSNorm and SwiGLU.

The shape that most others share, and the shortest example of a family. What differs in the aliases is in its modules:
biases of q, k and v (Qwen 2, Seed-OSS), norms of each head of q and k (Qwen 3). Sliding windows (Mistral, Ministral)
arrive as the mask; rotation by time, row and column (Qwen's VL models' text) as cos and sin.
"""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules, renamed


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

ALIASES = (
    renamed(FAMILY, "mistral", "Llama", "Mistral", {"mistral": {"sliding_window": 24, "head_dim": 64}}),
    renamed(FAMILY, "ministral", "Llama", "Ministral", {"ministral": {"sliding_window": 24, "head_dim": 64}}),
    renamed(FAMILY, "qwen2", "Llama", "Qwen2", {"qwen2": {}}),
    renamed(FAMILY, "qwen3", "Llama", "Qwen3", {"qwen3": {"head_dim": 64}}),
    renamed(FAMILY, "seed_oss", "Llama", "SeedOss", {"seed_oss": {"head_dim": 64, "residual_dropout": 0.0}}),
    renamed(FAMILY, "qwen2_5_vl", "Llama", "Qwen2_5_VL", {}, causal=""),
    renamed(FAMILY, "qwen3_vl", "Llama", "Qwen3VLText", {}, causal=""),
    # Norms multiply by 1 + weight; GELU is the gate's activation.
    renamed(FAMILY, "gemma", "Llama", "Gemma", {"gemma": {"head_dim": 64}}, plus_one=True),
)
