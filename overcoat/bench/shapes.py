"""Decoder blocks by name, and models of random weights: what `overcoat bench` builds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from overcoat.extras import load_extra
from overcoat.models.shapes import MODELS, ModelShape


class BlockShape(NamedTuple):
    """One decoder block of a model, and the batch and sequence it runs on."""

    model: ModelShape
    batch: int
    sequence: int

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


# COAT's layer of hidden 2048 has Llama's ratio of intermediate to hidden.
_1B = replace(MODELS["olmo-1b"], intermediate=5504)
BLOCKS = {
    "1b-s2048": BlockShape(_1B, 4, 2048),
    "1b-s4096": BlockShape(_1B, 4, 4096),
    "7b-s2048": BlockShape(MODELS["llama-2-7b"], 4, 2048),
    "7b-s4096": BlockShape(MODELS["llama-2-7b"], 4, 4096),
    "llama3-8b": BlockShape(MODELS["llama-3-8b"], 4, 2048),
    "13b": BlockShape(MODELS["llama-2-13b"], 4, 2048),
    "30b": BlockShape(MODELS["llama-30b"], 2, 2048),
    "qwen2.5-7b": BlockShape(MODELS["qwen2.5-7b"], 4, 2048),
}


def build_block(shape: BlockShape, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[nn.Module, tuple[Any, Any]]:
    """A transformers model of one layer with random weights, the same for the same seed, and its cos and sin.

    Norm weights and biases are random too: at their usual ones and zeros an error in them would not show.
    """
    transformers = load_extra("transformers", "bench", "overcoat bench")
    torch.manual_seed(seed)
    config = replace(shape.model, layers=1, vocab=32).config()
    with torch.device(device):
        model = transformers.AutoModel.from_config(config, dtype=dtype).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.2, 1.8)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    positions = torch.arange(shape.sequence, device=device)[None]
    return model, model.rotary_emb(torch.empty(1, dtype=dtype, device=device), positions)


def build_model(shape: ModelShape, dtype: torch.dtype, device: str) -> nn.Module:
    """A whole transformers model, random weights made on the device, in training mode."""
    transformers = load_extra("transformers", "bench", "overcoat bench")
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(shape.config(), dtype=dtype).train()
