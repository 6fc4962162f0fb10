"""ViT: LayerNorm, biases, attention of all tokens without rotation, an MLP with GELU and without gate."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, plain_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + fc2(gelu(fc1(norm(x))))."""
    mlp = layer.mlp
    return (
        attention(layer.attention, batch, pre=layer.layernorm_before),
        plain_mlp(mlp, mlp.fc1, mlp.fc2, layer.attention.config.hidden_act, pre=layer.layernorm_after),
    )


FAMILY = Family(
    module="transformers.models.vit.modeling_vit",
    layer="ViTLayer",
    causal="ViTModel",
    norm=None,
    branches=branches,
    samples={"vit": {}},
    encoder=True,
    rotary=False,
)
