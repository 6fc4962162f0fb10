"""InternVL's tower: ViT with a scale of each column (LayerScale); in the largest one RMSNorms, also of all heads of q
together and of k."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, plain_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + scale * attention(norm(x)); x = x + scale * fc2(gelu(fc1(norm(x))))."""
    module, mlp = layer.attention, layer.mlp
    return (
        attention(
            module,
            batch,
            out=module.projection_layer,
            pre=layer.layernorm_before,
            full_norm=True,
            layer_scale=layer.lambda_1,
        ),
        plain_mlp(mlp, mlp.fc1, mlp.fc2, mlp.config.hidden_act, pre=layer.layernorm_after, layer_scale=layer.lambda_2),
    )


FAMILY = Family(
    module="transformers.models.internvl.modeling_internvl",
    layer="InternVLVisionLayer",
    causal="InternVLVisionModel",
    norm="InternVLVisionRMSNorm",
    branches=branches,
    samples={"internvl": {}, "internvl-6b": {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}},
    encoder=True,
    rotary=False,
)
