"""peft's LoRA inside a layer: which of its linear layers run with the FP8 block, and what their adapters are.

Read by name and attributes, without importing peft. `lora.Linear` around nn.Linear or GPT-2's Conv1D, as it is by
default, becomes `block.spec.Adapter`; whatever computes something else (DoRA, dropout, a quantized base, other tuners)
is named in the reason why the layer stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

from torch import nn

from overcoat.block.spec import Adapter

CLASS = ("peft.tuners.lora.layer", "Linear")
NAMES = {"DoraLinearVariant": "DoRA"}


def is_lora(linear: Any) -> bool:
    """True if this is peft's own LoRA layer, not a subclass."""
    cls = type(linear)
    return cls is not nn.Linear and (cls.__module__, cls.__name__) == CLASS


def base_of(linear: Any) -> Any:
    """The linear layer itself, or inside a LoRA layer."""
    return linear.base_layer if is_lora(linear) else linear


def parts_of(linear: Any) -> Iterator[Any]:
    """The modules whose forward the block stands in for."""
    yield linear
    if is_lora(linear):
        yield linear.base_layer
        for name in _names(linear):
            yield from (linear.lora_A[name], linear.lora_B[name])


def active_adapters(linear: Any, place: int = 0) -> list[Adapter]:
    """Return the adapters that a linear layer's forward adds, in order; place: index of the layer in its stack."""
    if not is_lora(linear):
        return []
    if linear.disable_adapters and linear.merged:
        linear.unmerge()  # as its own forward does
    return [
        Adapter(linear.lora_A[name].weight, linear.lora_B[name].weight, float(linear.scaling[name]), place)
        for name in _names(linear)
    ]


def why_not_plain(linear: Any) -> Optional[str]:
    """Return what an active adapter computes beside (x A^T) B^T, or None."""
    for name in _names(linear):
        variant, dropout = linear.lora_variant.get(name), linear.lora_dropout[name]
        rate = getattr(dropout, "p", 0.0)
        if variant is not None:
            kind = type(variant).__name__
            return NAMES.get(kind, kind)
        if rate or not isinstance(dropout, (nn.Identity, nn.Dropout)):
            return f"lora_dropout {rate}: only 0 is supported"
        if linear.lora_B[name].bias is not None:
            return "lora_bias"
    return None


def _names(linear: Any) -> list[str]:
    """Return the names of the adapters that its forward adds."""
    if linear.disable_adapters or linear.merged:
        return []
    return [name for name in linear.active_adapters if name in linear.lora_A]
