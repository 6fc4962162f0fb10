"""CLIP: LayerNorm, biases, attention of all tokens without rotation, an MLP with quick_gelu and without gate.

The text tower's layers are of the same class, and the model asks them for causal attention in the call.
"""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, plain_mlp
from overcoat.models.family import Family, Modules, renamed


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + fc2(gelu(fc1(norm(x))))."""
    module, mlp = layer.self_attn, layer.mlp
    return (
        attention(module, batch, out=module.out_proj, pre=layer.layer_norm1),
        plain_mlp(mlp, mlp.fc1, mlp.fc2, module.config.hidden_act, pre=layer.layer_norm2),
    )


FAMILY = Family(
    module="transformers.models.clip.modeling_clip",
    layer="CLIPEncoderLayer",
    causal="CLIPVisionModel",
    norm=None,
    branches=branches,
    samples={"clip": {}, "clip-gelu": {"hidden_act": "gelu"}},
    encoder=True,
    rotary=False,
)

ALIASES = (
    # GELU by tanh.
    renamed(FAMILY, "siglip", "CLIP", "Siglip", {"siglip": {}}),
    # On images of different sizes, padded to one length: a mask of all pairs hides the padding.
    renamed(FAMILY, "siglip2", "CLIP", "Siglip2", {"siglip2": {}}),
    renamed(FAMILY, "idefics3", "CLIP", "Idefics3", {"idefics3": {}}, causal="Idefics3VisionTransformer"),
    renamed(FAMILY, "smolvlm", "CLIP", "SmolVLM", {"smolvlm": {}}, causal="SmolVLMVisionTransformer"),
)
