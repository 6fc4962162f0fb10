"""Qwen 3 VL's tower: LayerNorm, fused q, k and v, rotation by row and column, an MLP with GELU and without gate.

Images of all sizes lie in one row (T, H); `cu_seqlens` says where each begins.
"""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, plain_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + linear_fc2(gelu(linear_fc1(norm(x))))."""
    module, mlp = layer.attn, layer.mlp
    return (
        attention(module, batch, into=(module.qkv,), out=module.proj, pre=layer.norm1),
        plain_mlp(mlp, mlp.linear_fc1, mlp.linear_fc2, module.config.hidden_act, pre=layer.norm2),
    )


FAMILY = Family(
    module="transformers.models.qwen3_vl.modeling_qwen3_vl",
    layer="Qwen3VLVisionBlock",
    causal="Qwen3VLVisionModel",
    norm=None,
    branches=branches,
    samples={"qwen3-vl-vision": {}},
    encoder=True,
)
