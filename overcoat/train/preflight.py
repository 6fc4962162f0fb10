"""Checks of a model that `train` makes before data are read, and `init` before it writes a configuration."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import overcoat
from overcoat.extras import load_pretrained
from overcoat.train.build import auto_class, check_tables, make_recipe, model_settings
from overcoat.train.config import Config, require


def check_named_model(config: Config) -> None:
    """Refuse a `model.name` that cannot be trained as configured, by its config.json alone. Code of its own, which
    may make any model, is left to the training itself."""
    kind = load_pretrained("AutoConfig", "model.name =", config.model.name, config.model.trust_remote_code)
    if type(kind).__module__.startswith("transformers."):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the training says them, too
            check_tables(trial_model(config, kind), 0, config)


def trial_model(config: Config, kind: Any) -> Any:
    """Return the converted model of a transformers configuration, without memory. ValueError: its weights are
    quantized, its values make no model, or none of its layers trains in FP8 and the recipe asks for that."""
    found = getattr(kind, "quantization_config", None) or {}
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", found)
    require(
        not found,
        f"model.name = {config.model.name!r} has quantized weights ({getattr(method, 'value', method)!s:.40}), "
        "which are not trained, nor adapters on them: name the checkpoint that it was made from",
    )
    with torch.device("meta"):
        model = auto_class(type(kind)).from_config(kind, **model_settings(config.model))
    overcoat.convert(model, make_recipe(config.recipe), strict=True)
    return model
