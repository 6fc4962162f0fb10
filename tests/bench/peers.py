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
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overcoat.bench.layer import decibels, powers
from overcoat.bench.shapes import BlockShape
from overcoat.models.shapes import Model, sizes
from tests.models.zoo import KINDS

SMALL = Model("LlamaConfig", sizes(128, 256, 2, 4, 2, 320))
SHAPE = BlockShape(SMALL, 2, 16)
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q (B, S, heads, D), k and v (B, S, kv heads, D); cos and sin broadcast to q without heads."""

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    q, k, v = (x.transpose(1, 2) for x in (rotate(q), rotate(k), v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


class FakeTransformerLayer(nn.Module):
    """transformer_engine.pytorch.TransformerLayer with fused, not interleaved q, k, v."""

    def __init__(self, hidden: int, ffn: int, heads: int, **options: Any) -> None:
        super().__init__()
        expected = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "attn_input_format": "bshd"}
        assert {key: options[key] for key in expected} == expected
        assert options["fuse_qkv_params"] is True
        assert options["qkv_weight_interleaved"] is False
        self.eps, self.heads, self.groups = options["layernorm_epsilon"], heads, options["num_gqa_groups"]
        self.width = options["kv_channels"]
        dtype = options["params_dtype"]
        qkv = (heads + 2 * self.groups) * self.width
        self.self_attention = nn.Module()
        self.self_attention.layernorm_qkv = nn.Linear(hidden, qkv, bias=False, dtype=dtype)
        self.self_attention.layernorm_qkv.layer_norm_weight = nn.Parameter(torch.ones(hidden, dtype=dtype))
        self.self_attention.proj = nn.Linear(heads * self.width, hidden, bias=False, dtype=dtype)
        self.layernorm_mlp = nn.Module()
        self.layernorm_mlp.layer_norm_weight = nn.Parameter(torch.ones(hidden, dtype=dtype))
        self.layernorm_mlp.fc1_weight = nn.Parameter(torch.empty(2 * ffn, hidden, dtype=dtype))
        self.layernorm_mlp.fc2_weight = nn.Parameter(torch.empty(hidden, ffn, dtype=dtype))

    def forward(self, x: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        qkv = self.self_attention.layernorm_qkv
        mixed = qkv(rms_norm(x, qkv.layer_norm_weight, self.eps)).unflatten(-1, (-1, self.width))
        q, k, v = mixed.split([self.heads, self.groups, self.groups], 2)
        frequencies = rotary_pos_emb[: x.shape[1]].transpose(0, 1)  # (1, S, 1, D)
        cos, sin = frequencies.cos().to(x.dtype), frequencies.sin().to(x.dtype)
        x = x + self.self_attention.proj(causal_attention(q, k, v, cos, sin))
        mlp = self.layernorm_mlp
        gate, up = F.linear(rms_norm(x, mlp.layer_norm_weight, self.eps), mlp.fc1_weight).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, mlp.fc2_weight)


class FakeRotary(nn.Module):
    """transformer_engine.pytorch.attention.RotaryPositionEmbedding."""

    def __init__(self, dim: int, rotary_base: float) -> None:
        super().__init__()
        self.rates = 1.0 / rotary_base ** (torch.arange(0, dim, 2) / dim)

    def forward(self, max_seq_len: int) -> Tensor:
        angles = torch.arange(max_seq_len)[:, None] * self.rates
        return torch.cat((angles, angles), -1)[:, None, None]


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
