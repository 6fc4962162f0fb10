"""GPT-2: LayerNorm, learned positions instead of a rotation, weights stored transposed."""

from __future__ import annotations

from typing import Any, Optional

from overcoat.models.decoder import attention, plain_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + c_proj(gelu(c_fc(norm(x))))."""
    of_scores, mlp = layer.attn, layer.mlp
    activation = of_scores.config.activation_function
    return (
        attention(of_scores, batch, pre=layer.ln_1, into=(of_scores.c_attn,), out=of_scores.c_proj),
        plain_mlp(mlp, mlp.c_fc, mlp.c_proj, activation, pre=layer.ln_2),
    )


def refused(layer: Any) -> Optional[str]:
    """Attention to an encoder comes between the branches."""
    return "the layer has cross-attention, which is not supported" if hasattr(layer, "crossattention") else None


FAMILY = Family(
    module="transformers.models.gpt2.modeling_gpt2",
    layer="GPT2Block",
    causal="GPT2LMHeadModel",
    norm=None,
    branches=branches,
    refused=refused,
    rotary=False,
    trunk="transformer",
    stack="h",
    samples={"gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}},
)
