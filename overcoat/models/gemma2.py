"""Gemma 2: norms before and after each branch, windows in every other layer (as the mask), capped scores and logits.

Capped scores have no fused kernel: attention runs in plain PyTorch, and the report says so. Capped logits leave the
loss as it was.
"""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules, renamed


def sandwich(layer: Any, batch: int, **options: Any) -> tuple[Modules, ...]:
    """x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x))). options: of attention."""
    norms = {"pre": layer.input_layernorm, "post": layer.post_attention_layernorm}
    return (
        attention(layer.self_attn, batch, **norms, **options),
        gated_mlp(
            layer.mlp,
            layer.self_attn.config.hidden_activation,
            pre=layer.pre_feedforward_layernorm,
            post=layer.post_feedforward_layernorm,
        ),
    )


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    return sandwich(layer, batch, softcap=float(layer.self_attn.config.attn_logit_softcapping or 0.0))


FAMILY = Family(
    module="transformers.models.gemma2.modeling_gemma2",
    layer="Gemma2DecoderLayer",
    causal="Gemma2ForCausalLM",
    norm="Gemma2RMSNorm",
    plus_one=True,
    branches=branches,
    samples={
        "gemma2": {
            "head_dim": 64,
            "sliding_window": 24,
            "attn_logit_softcapping": 0.1,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 16,
            "attn_implementation": "eager",
        }
    },
)

GEMMA3 = {"head_dim": 64, "sliding_window": 24, "query_pre_attn_scalar": 128}
# Without caps, with norms of q and k, and a rotation for each kind of window.
ALIASES = (renamed(FAMILY, "gemma3", "Gemma2", "Gemma3", {"gemma3": GEMMA3}, branches=sandwich),)
