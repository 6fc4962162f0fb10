"""OLMoE: norms of all heads of q and of k, a router and experts, which run as they are."""

from __future__ import annotations

from typing import Any, Optional

from overcoat.models.decoder import as_it_is, attention
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + experts(norm(x))."""
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm, full_norm=True),
        as_it_is(layer.mlp, pre=layer.post_attention_layernorm),
    )


def refused(layer: Any) -> Optional[str]:
    """It would come after the norms of q and k."""
    clip = layer.self_attn.config.clip_qkv
    return None if clip is None else f"clip_qkv is {clip}; only None is supported"


FAMILY = Family(
    module="transformers.models.olmoe.modeling_olmoe",
    layer="OlmoeDecoderLayer",
    causal="OlmoeForCausalLM",
    norm="OlmoeRMSNorm",
    branches=branches,
    refused=refused,
    samples={"olmoe": {"num_experts": 2, "num_experts_per_tok": 2, "intermediate_size": 128}},
)
