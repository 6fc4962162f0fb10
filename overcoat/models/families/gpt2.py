"""LayerNorm, biases, an MLP with GELU and without gate: Starcoder 2, GPT-2."""

from __future__ import annotations

from typing import Any, Optional

from overcoat.models.decoder import attention, plain_mlp
from overcoat.models.family import Family, Modules


def starcoder2(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + attention(norm(x)); x = x + c_proj(gelu(c_fc(norm(x))))."""
    mlp, config = layer.mlp, layer.self_attn.config
    return (
        attention(layer.self_attn, batch, pre=layer.input_layernorm),
        plain_mlp(mlp, mlp.c_fc, mlp.c_proj, config.hidden_act, pre=layer.post_attention_layernorm),
    )


def gpt2(layer: Any, batch: int) -> tuple[Modules, ...]:
    """The same with learned positions instead of a rotation, and weights stored transposed."""
    module, mlp = layer.attn, layer.mlp
    return (
        attention(module, batch, pre=layer.ln_1, in_proj=(module.c_attn,), out_proj=module.c_proj),
        plain_mlp(mlp, mlp.c_fc, mlp.c_proj, module.config.activation_function, pre=layer.ln_2),
    )


def why_not_gpt2(layer: Any) -> Optional[str]:
    """Attention to an encoder comes between the branches."""
    return "the layer has cross-attention, which is not supported" if hasattr(layer, "crossattention") else None


NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
FAMILIES = (
    Family.of("starcoder2", "Starcoder2", starcoder2, {"starcoder2": {"sliding_window": 24}}, norm=None),
    Family.of(
        "gpt2", "GPT2", gpt2, {"gpt2": NO_DROPOUT}, layer="GPT2Block", causal="GPT2LMHeadModel", norm=None,
        refused=why_not_gpt2, rotary=False, backbone="transformer", stack="h",
    ),
)  # fmt: skip
