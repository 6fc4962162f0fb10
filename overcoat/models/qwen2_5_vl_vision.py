"""Qwen 2.5 VL's tower: RMSNorm, fused q, k and v, rotation by row and column, SwiGLU with biases.

Images of all sizes lie in one row (T, H). `cu_seqlens` says where each begins, or in most layers where each window of
8 x 8 patches does.
"""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""
    module = layer.attn
    return (
        attention(module, batch, into=(module.qkv,), out=module.proj, pre=layer.norm1),
        gated_mlp(layer.mlp, module.config.hidden_act, pre=layer.norm2),
    )


FAMILY = Family(
    module="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    layer="Qwen2_5_VLVisionBlock",
    causal="Qwen2_5_VisionTransformerPretrainedModel",
    norm="Qwen2_5_VLRMSNorm",
    branches=branches,
    samples={"qwen2.5-vl-vision": {"fullatt_block_indexes": [1]}},
    encoder=True,
)
