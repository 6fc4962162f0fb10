"""peft's LoRA inside a layer: which of its linear layers run with the FP8 block, and what their adapters are.

Layers are read by name and attributes, without importing peft. `lora.Linear` around nn.Linear or GPT-2's Conv1D, as it
is by default or with DoRA, becomes `block.spec.Adapter`; whatever computes something else (a quantized base, other
tuners) is named in the reason why the layer stays as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from overcoat.block.spec import Adapter
from overcoat.extras import load_extra
from overcoat.models.family import class_name

ALL = "all-linear"
CLASS = ("peft.tuners.lora.layer", "Linear")
DORA = ("peft.tuners.lora.variants", "DoraLinearVariant")


def add_lora(
    model: Any, rank: int, alpha: float = 16.0, targets: Sequence[str] = (ALL,), dropout: float = 0.0, **options: Any
) -> Any:
    """Return a transformers model wrapped in peft's `PeftModel`: only its adapters train, in FP32.

    Args:
        targets: layers that get adapters, by the end of their names, or (ALL,).
        options: others of `peft.LoraConfig`.

    Raises:
        ValueError: of peft, or embeddings are among the targets.
    """
    peft = load_extra("peft", "hf", "LoRA")
    settings = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=ALL if tuple(targets) == (ALL,) else [*targets], lora_dropout=dropout,
        task_type="CAUSAL_LM", **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers 5.24 by an old name
        adapted = peft.get_peft_model(model, settings)
    if any("lora_embedding" in name for name, _ in adapted.named_parameters()):
        raise ValueError("adapters of embeddings are not supported, leave them out")
    merged = [each.get_param() for each in adapted.modules() if type(each).__name__ == "ParamWrapper"]
    if merged:
        size = sum(each.nbytes for each in merged) / 2**30
        warnings.warn(
            f"adapters of experts: peft merges {size:.2f} GiB of weights in each forward and holds "
            "them until the backward: to adapt attention alone, name q_proj, k_proj, v_proj, o_proj",
            stacklevel=2,
        )
    return adapted


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
            yield from (linear.lora_A[name], linear.lora_B[name], linear.lora_dropout[name])
            yield from _magnitudes(linear, name)


def active_adapters(linear: Any, place: int = 0) -> list[Adapter]:
    """Return the adapters that a linear layer's forward adds, in order; place: index of the layer in its stack."""
    if not is_lora(linear):
        return []
    if linear.disable_adapters and linear.merged:
        linear.unmerge()  # as its own forward does
    return [
        Adapter(
            linear.lora_A[name].weight,
            linear.lora_B[name].weight,
            float(linear.scaling[name]),
            place,
            _rate(linear.lora_dropout[name]),
            factor=_factor(linear, name),
        )
        for name in _names(linear)
    ]


def has_dora(linear: Any) -> bool:
    """True if the forward of a linear layer adds DoRA, which reads its weight in 16 bits."""
    return is_lora(linear) and any(_magnitudes(linear, name) for name in _names(linear))


def _magnitudes(linear: Any, name: str) -> list[Any]:
    """Return DoRA's module with the magnitudes of an adapter, or []."""
    return [] if linear.lora_variant.get(name) is None else [linear.lora_magnitude_vector[name]]


def _factor(linear: Any, name: str) -> Optional[Tensor]:
    """Return DoRA's magnitudes by the norms of the rows of W + scaling B A (N,), or None.

    |w + s b A|^2 = |w|^2 + 2 s (w A^T) b^T + s^2 b (A A^T) b^T for rows w (K,) of W and b (R,) of B: B A is never made.
    """
    for magnitude in _magnitudes(linear, name):
        with torch.no_grad():
            weight, scaling = linear.base_layer.weight, float(linear.scaling[name])
            a, b = (part[name].weight.float() for part in (linear.lora_A, linear.lora_B))  # (R, K), (N, R)
            weight = weight.decoded() if hasattr(weight, "decoded") else weight
            weight = weight.t() if linear.fan_in_fan_out else weight  # (N, K)
            squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
            across = 2 * (weight @ a.to(weight.dtype).t()).float() + scaling * (b @ (a @ a.t()))  # (N, R)
            norms = (squares + scaling * (across * b).sum(1)).sqrt()
        return magnitude.weight / norms
    return None


def _rate(dropout: Any) -> float:
    """Return the share of elements that peft's dropout module zeroes now."""
    return float(dropout.p) if type(dropout) is nn.Dropout and dropout.training else 0.0


def why_not_plain(linear: Any) -> Optional[str]:
    """Return what a linear layer is or has beside a plain weight and (x A^T) B^T of active adapters, or None."""
    base = base_of(linear)
    weight = base._parameters.get("weight")
    if weight is None and "weight" not in vars(base):
        return f"is a {class_name(base)}, which has no weight of its own"
    kind: Any = type(weight)
    # Quantized weights (torchao's) stay in nn.Linear, as a class of their own; a subclass of Parameter may be a mark.
    is_mark = issubclass(kind, nn.Parameter) and kind.__torch_function__ is nn.Parameter.__torch_function__
    if not is_mark and kind.__module__.partition(".")[0] not in ("torch", "overcoat", "builtins"):
        return f"has a weight of type {kind.__module__}.{kind.__name__}, not a plain tensor"
    if weight is not None and weight.element_size() < 2:
        return f"has a weight in {weight.dtype}; only BF16, FP16 and FP32 are supported: load it dequantized"
    for name in _names(linear) if is_lora(linear) else ():
        variant, dropout = linear.lora_variant.get(name), linear.lora_dropout[name]
        if variant is not None and (type(variant).__module__, type(variant).__name__) != DORA:
            return f"has {type(variant).__name__}"
        if variant is not None and len(_names(linear)) > 1:
            return "has DoRA beside other adapters, whose norms then are not its own"
        if variant is not None and _rate(dropout):
            return f"has DoRA with lora_dropout {dropout.p}, which takes a product with the base more: set it to 0"
        if type(dropout) not in (nn.Identity, nn.Dropout):
            return f"has lora_dropout by a {class_name(dropout)}: only nn.Dropout is supported"
        if (rate := _rate(dropout)) >= 1:
            return f"has lora_dropout {rate}: only rates below 1 are supported"
        if rate and torch.compiler.is_compiling():
            return f"has lora_dropout {rate}: only 0 is supported in compiled code, whose seeds would not change"
        if linear.lora_B[name].bias is not None:
            return "has lora_bias"
    return None


def _names(linear: Any) -> list[str]:
    """Return the names of the adapters that its forward adds."""
    if linear.disable_adapters or linear.merged:
        return []
    return [name for name in linear.active_adapters if name in linear.lora_A]
