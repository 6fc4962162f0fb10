"""Cohere (Command R): attention and MLP side by side behind one LayerNorm, neighbouring columns rotate together."""

from __future__ import annotations

from typing import Any, Optional

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules, renamed


def branches(layer: Any, batch: int, **options: Any) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)) + mlp(norm(x)). options: of attention."""
    norm = layer.input_layernorm
    return (
        attention(layer.self_attn, batch, pre=norm, neighbours=True, twice=True, **options),
        gated_mlp(layer.mlp, pre=norm),
    )


def of_cohere2(layer: Any, batch: int) -> tuple[Modules, ...]:
    """The layers without a window do not rotate."""
    return branches(layer, batch, rotates=layer.self_attn.sliding_window is not None)


def refused(layer: Any) -> Optional[str]:
    """Command R+'s norms of q and k have weights for each head."""
    return "use_qk_norm is True; only False is supported" if layer.self_attn.use_qk_norm else None


FAMILY = Family(
    module="transformers.models.cohere.modeling_cohere",
    layer="CohereDecoderLayer",
    causal="CohereForCausalLM",
    norm="CohereLayerNorm",
    centered=True,
    parallel=lambda layer: True,
    branches=branches,
    refused=refused,
    logit_scale=lambda model: float(model.logit_scale),
    samples={"cohere": {"bos_token_id": 1, "eos_token_id": 2, "logit_scale": 0.7}},
)

COHERE2 = {"bos_token_id": 1, "eos_token_id": 2, "sliding_window": 24}
# Command R7B, A. Windows arrive as the mask.
ALIASES = (
    renamed(
        FAMILY, "cohere2", "Cohere", "Cohere2", {"cohere2": COHERE2}, branches=of_cohere2, refused=lambda layer: None
    ),
)
