"""Check a model before data are read (`overcoat train`) or a configuration is written (`overcoat init`)."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import overcoat
from overcoat.extras import load_pretrained
from overcoat.train.adapters import base_name
from overcoat.train.build import auto_class, check_tables, keeps_codes, make_recipe, model_settings
from overcoat.train.config import Config
from overcoat.train.quantized import check_quantized


def check_named_model(config: Config) -> None:
    """Refuse a `model.name` that cannot be trained as configured, from its config.json alone. Models with remote code
    are checked when they are built."""
    kind = load_pretrained("AutoConfig", "model.name =", base_name(config), config.model.trust_remote_code)
    if type(kind).__module__.startswith("transformers."):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the training says them, too
            check_tables(trial_model(config, kind), 0, config)


def trial_model(config: Config, kind: Any) -> Any:
    """Return the converted model of a transformers configuration on the meta device. ValueError: quantized weights,
    values that make no model, or no layer that the recipe can train in FP8."""
    check_quantized(kind, base_name(config), config.model.dequantize, keeps_codes(config))
    with torch.device("meta"):
        model = auto_class(type(kind)).from_config(kind, **model_settings(config.model))
    overcoat.convert(model, make_recipe(config.recipe), strict=True)
    return model
