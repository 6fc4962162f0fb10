"""Gemma 2 and 3, GLM-4: norms before and after each branch. GLM, which is GLM-4 without the norms after.

Capped scores (Gemma 2) have no fused kernel: attention runs in plain PyTorch, and the report says so. Windows arrive as
the mask.
"""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp, rotated_columns
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int, **options: Any) -> tuple[Modules, ...]:
    """x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x))). options: of attention."""
    before, after = layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
    return (
        attention(
            layer.self_attn, batch, pre=layer.input_layernorm, post=layer.post_attention_layernorm, **options
        ),
        gated_mlp(layer.mlp, layer.self_attn.config.hidden_activation, pre=before, post=after),
    )  # fmt: skip


def gemma2(layer: Any, batch: int) -> tuple[Modules, ...]:
    return branches(layer, batch, softcap=float(layer.self_attn.attn_logit_softcapping or 0.0))


def glm(layer: Any, batch: int) -> tuple[Modules, ...]:
    """A part of each head rotates, neighbouring columns together. Only GLM-4 has norms after."""
    module, mlp = layer.self_attn, layer.mlp
    rotated, in_proj = rotated_columns(module, module.head_dim), (mlp.gate_up_proj,)
    after, last = (layer._modules.get(name) for name in ("post_self_attn_layernorm", "post_mlp_layernorm"))
    return (
        attention(module, batch, pre=layer.input_layernorm, post=after, rotated=rotated, rope_interleaved=True),
        gated_mlp(mlp, in_proj=in_proj, pre=layer.post_attention_layernorm, post=last),
    )


GEMMA = {"head_dim": 64, "sliding_window": 24}
CAPPED = {"attn_logit_softcapping": 0.1, "final_logit_softcapping": None, "query_pre_attn_scalar": 16}
GEMMA2 = {**GEMMA, **CAPPED, "attn_implementation": "eager"}
GLM = {"head_dim": 64, "attention_bias": True, "pad_token_id": 0}
FAMILIES = (
    Family.of("gemma2", "Gemma2", gemma2, {"gemma2": GEMMA2}, plus_one=True),
    # Without caps, with norms of q and k, and a rotation for each kind of window.
    Family.of("gemma3", "Gemma3", branches, {"gemma3": {**GEMMA, "query_pre_attn_scalar": 128}}, plus_one=True),
    Family.of("glm", "Glm", glm, {"glm": GLM}),
    Family.of("glm4", "Glm4", glm, {"glm4": GLM}),
)
