"""Attention and MLP side by side: Cohere (Command R, R7B, A), GPT-NeoX (Pythia)."""

from __future__ import annotations

from typing import Any, Optional

from overcoat.models.decoder import attention, gated_mlp, plain_mlp
from overcoat.models.family import Family, Modules


def cohere(layer: Any, batch: int, **options: Any) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)) + mlp(norm(x)), one LayerNorm; neighbouring columns rotate. options: of attention."""
    norm = layer.input_layernorm
    return (
        attention(layer.self_attn, batch, pre=norm, rope_interleaved=True, rope_repeated=True, **options),
        gated_mlp(layer.mlp, pre=norm),
    )


def cohere2(layer: Any, batch: int) -> tuple[Modules, ...]:
    """The layers without a window do not rotate."""
    return cohere(layer, batch, rotates=layer.self_attn.sliding_window is not None)


def why_not_cohere(layer: Any) -> Optional[str]:
    """Command R+'s norms of q and k have weights for each head."""
    return "use_qk_norm is True; only False is supported" if layer.self_attn.use_qk_norm else None


def gpt_neox(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)) + mlp(norm(x)), or with use_parallel_residual = False one after the other; q, k, v of
    each head in one layer."""
    module, mlp, width = layer.attention, layer.mlp, layer.attention.head_size
    options = {"qkv_interleaved": True, "width": width, "rotated": module.rotary_ndims % width}
    in_proj, out_proj, activation = mlp.dense_h_to_4h, mlp.dense_4h_to_h, module.config.hidden_act
    return (
        attention(
            module,
            batch,
            pre=layer.input_layernorm,
            in_proj=(module.query_key_value,),
            out_proj=module.dense,
            **options,
        ),
        plain_mlp(mlp, in_proj, out_proj, activation, pre=layer.post_attention_layernorm),
    )


IDS = {"bos_token_id": 1, "eos_token_id": 2}
COHERE: dict[str, Any] = {
    "centered": True, "parallel": lambda layer: True, "logit_scale": lambda model: float(model.logit_scale)
}  # fmt: skip
FAMILIES = (
    Family.of(
        "cohere", "Cohere", cohere, {"cohere": {**IDS, "logit_scale": 0.7}}, norm="CohereLayerNorm",
        refused=why_not_cohere, **COHERE,
    ),
    Family.of(
        "cohere2", "Cohere2", cohere2, {"cohere2": {**IDS, "sliding_window": 24}}, norm="Cohere2LayerNorm", **COHERE
    ),
    Family.of(
        "gpt_neox", "GPTNeoX", gpt_neox, {"gpt_neox": {}, "gpt_neox-sequential": {"use_parallel_residual": False}},
        layer="GPTNeoXLayer", norm=None, backbone="gpt_neox", parallel=lambda layer: bool(layer.use_parallel_residual),
    ),
)  # fmt: skip
