"""Small models, and what stands in for peers' packages that need not be installed: modules of the same interface, as
far as their documentation and source promise it, computing in plain PyTorch.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from benchmarks.layer import decibels, powers
from benchmarks.shapes import BlockShape
from overcoat.models.shapes import Model, sizes
from tests.models.zoo import KINDS

SMALL = Model("LlamaConfig", sizes(128, 256, 2, 4, 2, 320))
SHAPE = BlockShape(SMALL, 2, 16)
# A tiny mixture of experts: 8 of 64 columns, of which a token takes 2.
EXPERTS = Model("OlmoeConfig", sizes(128, 64, 2, 4, 2, 320, num_experts=8, num_experts_per_tok=2, eos_token_id=None))
# Models that see, by transformers' model type; LLaVA's images are of 16 pixels.
_TEXT = sizes(64, 96, 2, 2, 1, 96, head_dim=32, pad_token_id=0)
_IDS = {"image_token_id": 90, "video_token_id": 92, "vision_start_token_id": 91}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_CLIP = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
_TOWER = {"depth": 2, "num_heads": 2, "hidden_size": 64, "intermediate_size": 96, "patch_size": 4}
_DEEP = {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
SEEING = {
    "llava": Model(
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "clip_vision_model", **_CLIP, "image_size": 16, "patch_size": 4},
            "image_token_index": 90,
            "vision_feature_layer": -1,
        },
    ),
    "qwen3_vl": Model(
        "Qwen3VLConfig",
        {"text_config": {**_TEXT, "rope_parameters": _ROPE}, "vision_config": {**_TOWER, **_DEEP}, **_IDS},
    ),
}


def model_of(kind: str) -> Model:
    """A small model of one of the registry's families."""
    family, extra = KINDS[kind]
    causal = getattr(importlib.import_module(family.module), family.causal)
    return Model(causal.config_class.__name__, {**SMALL.fields, "attention_dropout": 0.0, **extra})


def sqnr(truth: Tensor, got: Tensor) -> float:
    """Signal to quantization noise ratio in dB."""
    return decibels(*powers(truth, got))


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """An importable module of these contents; its parents must be made first."""
    made = ModuleType(name)
    made.__dict__.update(contents)
    made.__path__ = []  # type: ignore[attr-defined]
    made.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, made)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, made)
    return made
