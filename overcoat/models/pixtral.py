"""Pixtral, Mistral 3's tower: RMSNorm, rotation by row and column, SwiGLU; all images in one row, kept apart by the
mask."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""
    return (
        attention(layer.attention, batch, pre=layer.attention_norm),
        gated_mlp(layer.feed_forward, pre=layer.ffn_norm),
    )


FAMILY = Family(
    module="transformers.models.pixtral.modeling_pixtral",
    layer="PixtralAttentionLayer",
    causal="PixtralVisionModel",
    norm="PixtralRMSNorm",
    branches=branches,
    samples={"pixtral": {}},
    encoder=True,
)
