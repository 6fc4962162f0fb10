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
    """Return the model to load: model.name, or the one that its adapters were made for. ValueError: as of
    `base_of_adapters`."""
    return base_of_adapters(config.model.name) if config.model.holds_adapters else config.model.name


def base_of_adapters(folder: str, what: str = "model.name =") -> str:
    """Return the model that a folder's adapters were made for. what: for messages. ValueError: they name none, or are
    no LoRA."""
    found = _settings(folder, what)
    base, kind = str(found.base_model_name_or_path or ""), getattr(found.peft_type, "value", found.peft_type)
    require(kind == "LORA", f"{what} {folder!r} holds adapters of kind {kind}: only LoRA's are read")
    require(bool(base), f"{what} {folder!r}: its adapter_config.json names no base_model_name_or_path: add it")
    return base


def tokenizer_of(config: Config) -> str:
    """Return where the tokenizer of model.name is: beside adapters, or with their model."""
    beside = (Path(config.model.name) / "tokenizer_config.json").is_file()
    return base_name(config) if config.model.holds_adapters and not beside else config.model.name


def num_trained_rows(folder: str) -> int:
    """Return how many rows of tables a folder's adapters train: of tokens that may be new."""
    rows = _settings(folder).trainable_token_indices
    return max(map(len, rows.values()), default=0) if isinstance(rows, dict) else len(rows or [])


def load_adapters(model: Any, folder: str, merge: bool = False, what: str = "model.name =") -> Any:
    """Return the model with a folder's adapters: to train on in FP32, or merged into it."""
    peft, settings = load_extra("peft", "hf", "adapters"), _settings(folder, what)
    device = str(next(model.parameters()).device)
    with error_context(f"{what} {folder!r}: ", Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("error", "Found missing adapter keys")  # they would be drawn anew
        model = peft.PeftModel.from_pretrained(
            model, folder, config=settings, is_trainable=not merge, torch_device=device
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
        return add_lora(
            model, section.rank, section.alpha, section.targets, section.dropout, use_dora=section.dora, **options
        )


def new_adapters(model: Any, folder: str) -> Any:
    """Return the model with new adapters like a folder's, whose weights are to be read."""
    return load_extra("peft", "hf", "adapters").get_peft_model(model, _settings(folder))


def _settings(folder: str, what: str = "model.name =") -> Any:
    peft = load_extra("peft", "hf", "adapters")
    with error_context(f"cannot load {what} {folder!r}: ", Exception):
        return peft.PeftConfig.from_pretrained(folder)
