"""OLMo 2 and 3, Exaone 4: norms after the attention and the MLP instead of before, and norms of q and k."""

from __future__ import annotations

from typing import Any

from overcoat.models.decoder import attention, gated_mlp
from overcoat.models.family import Family, Modules


def branches(layer: Any, batch: int, **options: Any) -> tuple[Modules, ...]:
    """x = x + norm(attention(x)); x = x + norm(mlp(x)). options: of attention."""
    return (
        attention(layer.self_attn, batch, post=layer.post_attention_layernorm, **options),
        gated_mlp(layer.mlp, post=layer.post_feedforward_layernorm),
    )


def olmo2(layer: Any, batch: int) -> tuple[Modules, ...]:
    """One norm of all heads of q, one of k."""
    return branches(layer, batch, full_norm=True)


def exaone4(layer: Any, batch: int) -> tuple[Modules, ...]:
    """A norm of each head. Where some layers have a window, those without do not rotate q and k."""
    module = layer.self_attn
    return branches(layer, batch, rotates=module.sliding_window is None or module.is_sliding)


FAMILIES = (
    Family.of("olmo2", "Olmo2", olmo2, {"olmo2": {}}),
    # Sliding windows in three layers of four.
    Family.of("olmo3", "Olmo3", olmo2, {"olmo3": {"sliding_window": 24}}),
    Family.of("exaone4", "Exaone4", exaone4, {"exaone4": {"sliding_window": 24, "sliding_window_pattern": 2}}),
)
