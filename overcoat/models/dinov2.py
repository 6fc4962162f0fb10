"""DINOv2: ViT with a scale of each column after attention and MLP (LayerScale), and in the largest model SwiGLU."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp, plain_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + scale * attention(norm(x)); x = x + scale * mlp(norm(x))."""
    mlp, after = layer.mlp, {"pre": layer.norm2, "layer_scale": layer.layer_scale2}
    return (
        attention(layer.attention, batch, pre=layer.norm1, layer_scale=layer.layer_scale1),
        gated_mlp(mlp, "silu", **after)
        if hasattr(mlp, "gate_proj")
        else plain_mlp(mlp, mlp.fc1, mlp.fc2, mlp.config.hidden_act, **after),
    )


FAMILY = Family(
    module="transformers.models.dinov2.modeling_dinov2",
    layer="Dinov2Layer",
    causal="Dinov2Model",
    norm=None,
    branches=branches,
    samples={"dinov2": {}, "dinov2-swiglu": {"use_swiglu_ffn": True}},
    encoder=True,
    rotary=False,
)
