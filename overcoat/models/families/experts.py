"""Llama whose MLP is a router and experts, which run beside the block (overcoat/models/experts.py)."""

from __future__ import annotations

from typing import Any, Optional

from overcoat.models.decoder import as_it_is, attention, gated_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int, **options: Any) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + experts(norm(x)). options: of attention."""
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm, **options),
        as_it_is(layer.mlp, pre=layer.post_attention_layernorm),
    )


def qwen3_moe(layer: Any, batch: int) -> tuple[Modules, ...]:
    """A layer may have an MLP instead."""
    first, experts = branches(layer, batch)
    return first, gated_mlp(layer.mlp, pre=experts.pre) if type(layer.mlp).__name__ == "Qwen3MoeMLP" else experts


def olmoe(layer: Any, batch: int) -> tuple[Modules, ...]:
    """Norms of all heads of q and of k."""
    return branches(layer, batch, full_norm=True)


def why_not_olmoe(layer: Any) -> Optional[str]:
    """It would come after the norms of q and k."""
    clip = layer.self_attn.config.clip_qkv
    return None if clip is None else f"clip_qkv is {clip}; only None is supported"


def gpt_oss(layer: Any, batch: int) -> tuple[Modules, ...]:
    """Biases, attention sinks, windows in every other layer."""
    return branches(layer, batch, sinks="sinks")


MLP = {"intermediate_size": 128}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2}
QWEN = {**EXPERTS, "head_dim": 64, "moe_intermediate_size": 128, "mlp_only_layers": [1]}
LOCAL = {"num_local_experts": 2, **MLP}
GPT_OSS = {
    **LOCAL, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 24, "attn_implementation": "eager"
}  # fmt: skip
FAMILIES = (
    Family.of("mixtral", "Mixtral", branches, {"mixtral": LOCAL}),
    Family.of("qwen3_moe", "Qwen3Moe", qwen3_moe, {"qwen3_moe": QWEN}),
    Family.of("olmoe", "Olmoe", olmoe, {"olmoe": {**EXPERTS, **MLP}}, refused=why_not_olmoe),
    Family.of("gpt_oss", "GptOss", gpt_oss, {"gpt_oss": GPT_OSS}),
)
