"""OLMo 2: norms after the attention and the MLP instead of before, and one norm of all heads of q, one of k."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int) -> tuple[Modules, ...]:
    """x = x + norm(attention(x)); x = x + norm(mlp(x))."""
    return (
        attention(layer.self_attn, batch, post=layer.post_attention_layernorm, full_norm=True),
        gated_mlp(layer.mlp, post=layer.post_feedforward_layernorm),
    )


FAMILIES = (
    Family.of("olmo2", "Olmo2", branches, {"olmo2": {}}),
    # Sliding windows in three layers of four.
    Family.of("olmo3", "Olmo3", branches, {"olmo3": {"sliding_window": 24}}),
)
