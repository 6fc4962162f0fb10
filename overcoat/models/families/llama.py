"""Llama and those whose layers are built alike: RMSNorm and attention with rotary embedding, RMSNorm and a gated MLP.

What differs in most is in their modules: biases of q, k and v (Qwen 2, Seed-OSS), norms of each head of q and k
(Qwen 3). Sliding windows (Mistral, Ministral) are `Heads.window` or the mask's; rotation by time, row and column (in
Qwen's VL models) comes as cos and sin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overcoat.models.decoder import attention, gated_mlp, plain_mlp, rotated_columns
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int, scale: float = 1.0, **options: Any) -> tuple[Modules, ...]:
    """x = x + scale * attention(norm(x)); x = x + scale * mlp(norm(x)). options: of attention."""
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm, scale=scale, **options),
        gated_mlp(layer.mlp, pre=layer.post_attention_layernorm, scale=scale),
    )


def smollm3(layer: Any, batch: int) -> tuple[Modules, ...]:
    """Every fourth layer does not rotate q and k."""
    return branches(layer, batch, rotates=bool(layer.self_attn.use_rope))


def olmo(layer: Any, batch: int) -> tuple[Modules, ...]:
    """q, k and v are limited to +- clip_qkv if that is given; LayerNorms without weights."""
    return branches(layer, batch, clip=float(layer.self_attn.config.clip_qkv or 0.0))


def granite(layer: Any, batch: int) -> tuple[Modules, ...]:
    """Multipliers of scores, which are attention's scale, of the branches, of the embedding and the logits."""
    return branches(layer, batch, scale=float(layer.residual_multiplier))


def rope_interleaved(layer: Any, batch: int) -> tuple[Modules, ...]:
    """Neighbouring columns of q and k rotate together."""
    return branches(layer, batch, rope_interleaved=True)


def arcee(layer: Any, batch: int) -> tuple[Modules, ...]:
    """An MLP without gate: down_proj(relu(up_proj(x))^2)."""
    mlp, config = layer.mlp, layer.self_attn.config
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm),
        plain_mlp(mlp, mlp.up_proj, mlp.down_proj, config.hidden_act, pre=layer.post_attention_layernorm),
    )


def phi3(layer: Any, batch: int) -> tuple[Modules, ...]:
    """q, k, v in one layer, gate and up in another; of Phi-4 mini's heads a part rotates."""
    module, mlp = layer.self_attn, layer.mlp
    rotated = rotated_columns(module, module.head_dim)
    return (
        attention(module, batch, pre=layer.input_layernorm, in_proj=(module.qkv_proj,), rotated=rotated),
        gated_mlp(mlp, layer.config.hidden_act, pre=layer.post_attention_layernorm, in_proj=(mlp.gate_up_proj,)),
    )


def q_scale(layer: Any, position_ids: Tensor) -> Tensor:
    """Ministral 3's q grows with the position: 1 + beta * log(1 + floor(position / original length))."""
    rope = layer.self_attn.config.rope_parameters
    turns = torch.floor(position_ids / rope["original_max_position_embeddings"])
    return 1 + rope["llama_4_scaling_beta"] * torch.log(1 + turns)


WINDOW = {"sliding_window": 24, "head_dim": 64}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
GROWING = ROPE | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}
BY_PLACE = ROPE | {"mrope_section": [8, 12, 12]}
RESIDUAL = {"residual_multiplier": 0.3}
MULTIPLIERS = RESIDUAL | {"attention_multiplier": 0.2, "embedding_multiplier": 6.0, "logits_scaling": 0.7}
BIASES = {"attention_bias": True, "mlp_bias": True}
FAMILIES = (
    Family.of("llama", "Llama", branches, {"llama": {}, "llama-biases": BIASES}),
    Family.of("mistral", "Mistral", branches, {"mistral": WINDOW}),
    Family.of("ministral", "Ministral", branches, {"ministral": WINDOW}),
    Family.of("cwm", "Cwm", branches, {"cwm": WINDOW}),
    Family.of(
        "ministral3", "Ministral3", branches, {"ministral3": {"head_dim": 64, "rope_parameters": GROWING}},
        q_scale=q_scale,
    ),
    Family.of("qwen2", "Qwen2", branches, {"qwen2": {}}),
    Family.of("qwen3", "Qwen3", branches, {"qwen3": {"head_dim": 64}}),
    Family.of(
        "qwen2_5_vl", "Qwen2_5_VL", branches, {"qwen2.5-vl": {"hidden_size": 256, "rope_parameters": BY_PLACE}},
        causal="Qwen2_5_VLTextModel", backbone="",
    ),
    Family.of(
        "qwen3_vl", "Qwen3VLText", branches, {"qwen3-vl": {"head_dim": 64, "rope_parameters": BY_PLACE}},
        causal="Qwen3VLTextModel", backbone="",
    ),
    Family.of("seed_oss", "SeedOss", branches, {"seed_oss": {"head_dim": 64, "residual_dropout": 0.0}}),
    # Norms multiply by 1 + weight; GELU is the gate's activation.
    Family.of("gemma", "Gemma", branches, {"gemma": {"head_dim": 64}}, plus_one=True),
    Family.of("ernie4_5", "Ernie4_5", rope_interleaved, {"ernie4_5": {"use_bias": True}}),
    Family.of("helium", "Helium", rope_interleaved, {"helium": BIASES | {"hidden_size": 256, "head_dim": 64}}),
    Family.of("arcee", "Arcee", arcee, {"arcee": {}}),
    Family.of("smollm3", "SmolLM3", smollm3, {"smollm3": {"pad_token_id": 0}}),
    Family.of("olmo", "Olmo", olmo, {"olmo": {"clip_qkv": 0.4}}, norm="OlmoLayerNorm", centered=True),
    Family.of(
        "granite", "Granite", granite, {"granite": MULTIPLIERS, "granite-biases": BIASES | RESIDUAL},
        logit_scale=lambda model: 1.0 / model.config.logits_scaling,
    ),
    Family.of(
        "phi3", "Phi3", phi3,
        {
            "phi3": {"sliding_window": 24, "pad_token_id": 0},
            "phi4-mini": {"pad_token_id": 0, "rope_parameters": ROPE | {"partial_rotary_factor": 0.75}},
        },
    ),
)  # fmt: skip
