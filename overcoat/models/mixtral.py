"""Mixtral: Llama whose MLP is a router and experts; these run as they are."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import as_it_is, attention
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + experts(norm(x))."""
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm),
        as_it_is(layer.mlp, pre=layer.post_attention_layernorm),
    )


FAMILY = Family(
    module="transformers.models.mixtral.modeling_mixtral",
    layer="MixtralDecoderLayer",
    causal="MixtralForCausalLM",
    norm="MixtralRMSNorm",
    branches=branches,
    samples={"mixtral": {"num_local_experts": 2, "intermediate_size": 128}},
)
