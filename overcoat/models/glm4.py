"""GLM-4: norms before and after each branch; a part of each head rotates, neighbouring columns together."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp, rotated_columns
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x)))."""
    of_scores, mlp = layer.self_attn, layer.mlp
    return (
        attention(
            of_scores,
            batch,
            pre=layer.input_layernorm,
            post=layer.post_self_attn_layernorm,
            rotated=rotated_columns(of_scores, of_scores.head_dim),
            neighbours=True,
        ),
        gated_mlp(
            mlp,
            mlp.config.hidden_act,
            into=(mlp.gate_up_proj,),
            pre=layer.post_attention_layernorm,
            post=layer.post_mlp_layernorm,
        ),
    )


FAMILY = Family(
    module="transformers.models.glm4.modeling_glm4",
    layer="Glm4DecoderLayer",
    causal="Glm4ForCausalLM",
    norm="Glm4RMSNorm",
    branches=branches,
    samples={"glm4": {"head_dim": 64, "attention_bias": True, "pad_token_id": 0}},
)
