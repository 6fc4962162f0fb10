"""LoRA: adapters as peft makes, loads and saves them.

[lora] adds new ones to a model. A folder of adapters as `model.name` names their model: both are loaded and training
goes on in the adapters, or they are merged first (`lora.merge_start`) and the model is trained as any other.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from overcoat.extras import load_extra
from overcoat.models.lora import add_lora
from overcoat.train.config import Config, LoraConfig, error_context, require


def base_name(config: Config) -> str:
    """Return the model to load: model.name, or the one that its adapters were made for. ValueError: they name none, or
    are no LoRA."""
    name = config.model.name
    if not config.model.holds_adapters:
        return name
    found = _settings(name)
    base, kind = str(found.base_model_name_or_path or ""), getattr(found.peft_type, "value", found.peft_type)
    require(kind == "LORA", f"model.name = {name!r} holds adapters of kind {kind}: LoRA's alone are trained on")
    require(bool(base), f"model.name = {name!r}: its adapter_config.json names no base_model_name_or_path: add it")
    return base


def tokenizer_of(config: Config) -> str:
    """Return where the tokenizer of model.name is: beside adapters, or with their model."""
    beside = (Path(config.model.name) / "tokenizer_config.json").is_file()
    return base_name(config) if config.model.holds_adapters and not beside else config.model.name


def num_trained_rows(config: Config) -> int:
    """Return how many rows of tables the adapters of model.name train: of tokens that may be new."""
    rows = _settings(config.model.name).trainable_token_indices if config.model.holds_adapters else None
    return max(map(len, rows.values()), default=0) if isinstance(rows, dict) else len(rows or [])


def load_adapters(model: Any, config: Config) -> Any:
    """Return the model with the adapters of model.name: to train on in FP32, or merged into it."""
    peft, name, merge = load_extra("peft", "hf", "adapters in model.name"), config.model.name, config.lora.merge_start
    settings = _settings(name)
    device = str(next(model.parameters()).device)
    with error_context(f"model.name = {name!r}: ", Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("error", "Found missing adapter keys")  # they would be drawn anew
        model = peft.PeftModel.from_pretrained(
            model, name, config=settings, is_trainable=not merge, torch_device=device
        )
        if merge:
            model = model.merge_and_unload(safe_merge=True).requires_grad_(True)
    return model


def add_adapters(
    model: Any, section: LoraConfig, seed: int, frozen: Sequence[str] = (), rows: dict[str, list[int]] | None = None
) -> Any:
    """Return the model wrapped in peft's `PeftModel`: only its adapters train, in FP32, drawn from `seed`,
    and `rows` of tables. Modules named in `frozen` get none."""
    torch.manual_seed(seed)
    options = {
        "exclude_modules": rf"(.*\.)?({'|'.join(map(re.escape, frozen))})(\..*)?" if frozen else None,
        "trainable_token_indices": rows,
    }
    with error_context(f"lora.targets = {section.targets}: "):
        return add_lora(model, section.rank, section.alpha, section.targets, section.dropout, **options)


def _settings(folder: str) -> Any:
    peft = load_extra("peft", "hf", "adapters in model.name")
    with error_context(f"cannot load model.name = {folder!r}: ", Exception):
        return peft.PeftConfig.from_pretrained(folder)
