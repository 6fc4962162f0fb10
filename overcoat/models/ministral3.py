"""Ministral 3: Llama whose q grows with the position, beyond the length that it was first trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overcoat.models.family import Family
from overcoat.models.llama import branches


def q_scale(layer: Any, position_ids: Tensor) -> Tensor:
    """1 + beta * log(1 + floor(position / original length))."""
    rope = layer.self_attn.config.rope_parameters
    turns = torch.floor(position_ids / rope["original_max_position_embeddings"])
    return 1 + rope["llama_4_scaling_beta"] * torch.log(1 + turns)


FAMILY = Family(
    module="transformers.models.ministral3.modeling_ministral3",
    layer="Ministral3DecoderLayer",
    causal="Ministral3ForCausalLM",
    norm="Ministral3RMSNorm",
    branches=branches,
    q_scale=q_scale,
    samples={
        "ministral3": {
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 16,
            },
        }
    },
)
