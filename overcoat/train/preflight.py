"""Check a model before data are read (`overcoat train`) or a configuration is written (`overcoat init`)."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import overcoat
from overcoat.extras import load_pretrained
from overcoat.streaming.choice import check_host, streamed_layers
from overcoat.train import process
from overcoat.train.adapters import base_name
from overcoat.train.build import (
    auto_class,
    check_builds,
    check_tables,
    freeze,
    keeps_codes,
    make_optimizer,
    make_recipe,
    model_settings,
)
from overcoat.train.config import Config
from overcoat.train.quantized import check_quantized


def check_named_model(config: Config) -> None:
    """Refuse a `model.name` that cannot be trained as configured, from its config.json alone. Models with remote code
    are checked when they are built."""
    kind = load_pretrained("AutoConfig", "model.name =", base_name(config), config.model.trust_remote_code)
    if type(kind).__module__.startswith("transformers."):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the training says them, too
            model = trial_model(config, kind)
            check_tables(model, 0, config)
        if config.train.stream and process.count() == 1:  # several may be on several hosts: `overcoat.stream` knows
            _check_host(model, config)


def check_inline_model(config: Config) -> None:
    """Refuse a streamed model of [model.config] that the host has no memory for."""
    if config.train.stream and process.count() == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said before
            model = check_builds(config.model, torch.device("cpu"), make_recipe(config.recipe))
        _check_host(model, config)


def _check_host(model: Any, config: Config) -> None:
    """Refuse a model whose streamed layers the host has no memory for, with the figures; model: on the meta device."""
    freeze(model, config.model.freeze)
    layers, _ = streamed_layers(model, config.train.resident)
    if not layers or not any(parameter.requires_grad for parameter in model.parameters()):
        return  # refused later
    optimizer = make_optimizer(model, config.optimizer, config.train.seed)
    if config.lora.rank or (config.model.holds_adapters and not config.lora.merge_start):  # these train instead
        model.requires_grad_(False)
    check_host(layers, optimizer)


def trial_model(config: Config, kind: Any) -> Any:
    """Return the converted model of a transformers configuration on the meta device. ValueError: quantized weights,
    values that make no model, or no layer that the recipe can train in FP8."""
    check_quantized(kind, base_name(config), config.model.dequantize, keeps_codes(config))
    with torch.device("meta"):
        model = auto_class(type(kind)).from_config(kind, **model_settings(config.model))
    overcoat.convert(model, make_recipe(config.recipe), strict=True)
    return model
