"""Models by name, as shapes: what `overcoat bench` builds with random weights.

Every model is built as Llama or, with biases on q, k and v, as Qwen2. "olmo-1b" is a Llama in OLMo-1B's shape (its own
norms have no weights). "124m" is configs/llama-124m.toml.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from overcoat.train.extras import load_extra


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only model's sizes. `qkv_bias`: q, k and v have biases; `tied`: the head is the embedding."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    qkv_bias: bool = False
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self) -> Any:
        """The transformers configuration."""
        transformers = load_extra("transformers", "bench", "overcoat bench")
        kind = transformers.Qwen2Config if self.qkv_bias else transformers.LlamaConfig
        return kind(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=8192,
            tie_word_embeddings=self.tied,
            attn_implementation="sdpa",
        )


class BlockShape(NamedTuple):
    """One decoder block of a model, and the batch and sequence it runs on."""

    model: ModelShape
    batch: int
    sequence: int

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


MODELS = {
    "124m": ModelShape(768, 2560, 12, 6, 6, 16384),
    "olmo-1b": ModelShape(2048, 8192, 16, 16, 16, 50304, tied=True),
    "llama-2-7b": ModelShape(4096, 11008, 32, 32, 32, 32000),
    "llama-3-8b": ModelShape(4096, 14336, 32, 32, 8, 128256),
    "qwen2.5-7b": ModelShape(3584, 18944, 28, 28, 4, 152064, qkv_bias=True),
    "llama-2-13b": ModelShape(5120, 13824, 40, 40, 40, 32000),
    "llama-30b": ModelShape(6656, 17920, 60, 52, 52, 32000),
}
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
