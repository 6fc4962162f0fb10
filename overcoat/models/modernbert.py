"""ModernBERT: LayerNorm, none before the first attention, fused q, k and v, rotation, gated GELU from one layer, and
windows, which arrive as the mask."""

from __future__ import annotations

from typing import Any

from overcoat.block.mlp import Mlp
from overcoat.models.decoder import activation_of, attention
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + Wo(gelu(first half) * second half of Wi(norm(x)))."""
    module, mlp = layer.attn, layer.mlp
    core = Mlp(activation_of(mlp.config.hidden_activation), True)
    return (
        attention(
            module, batch, into=(module.Wqkv,), out=module.Wo, scaling=module.head_dim**-0.5, pre=layer.attn_norm
        ),
        Modules(core, mlp, (mlp.Wi,), mlp.Wo, pre=layer.mlp_norm),
    )


FAMILY = Family(
    module="transformers.models.modernbert.modeling_modernbert",
    layer="ModernBertEncoderLayer",
    causal="ModernBertModel",
    norm=None,
    branches=branches,
    samples={"modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2}},
    encoder=True,
)
