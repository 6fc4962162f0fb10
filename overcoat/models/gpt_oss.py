"""gpt-oss: biases, attention sinks, windows in every other layer (as the mask), experts, which run as they are."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import as_it_is, attention
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + experts(norm(x))."""
    of_scores = layer.self_attn
    return (
        attention(of_scores, batch, pre=layer.input_layernorm, sinks=of_scores.sinks),
        as_it_is(layer.mlp, pre=layer.post_attention_layernorm),
    )


FAMILY = Family(
    module="transformers.models.gpt_oss.modeling_gpt_oss",
    layer="GptOssDecoderLayer",
    causal="GptOssForCausalLM",
    norm="GptOssRMSNorm",
    branches=branches,
    samples={
        "gpt_oss": {
            "head_dim": 64,
            "sliding_window": 24,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
            "attn_implementation": "eager",
        }
    },
)
