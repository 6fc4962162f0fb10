"""Models by name, as shapes, and the transformers configuration of any model. No weights are read.

A built-in shape is built as Llama or, with biases on q, k and v, as Qwen2. "olmo-1b" is a Llama in OLMo-1B's shape (its
own norms have no weights). "124m" is configs/llama-124m.toml.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overcoat.extras import load_extra
from overcoat.models.pretrained import load_pretrained


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


MODELS = {
    "124m": ModelShape(768, 2560, 12, 6, 6, 16384),
    "olmo-1b": ModelShape(2048, 8192, 16, 16, 16, 50304, tied=True),
    "llama-2-7b": ModelShape(4096, 11008, 32, 32, 32, 32000),
    "llama-3-8b": ModelShape(4096, 14336, 32, 32, 8, 128256),
    "qwen2.5-7b": ModelShape(3584, 18944, 28, 28, 4, 152064, qkv_bias=True),
    "llama-2-13b": ModelShape(5120, 13824, 40, 40, 40, 32000),
    "llama-30b": ModelShape(6656, 17920, 60, 52, 52, 32000),
}
# Checkpoints of the built-in shapes: their config.json need not be fetched.
CHECKPOINTS = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "Qwen/Qwen2.5-7B": "qwen2.5-7b",
    "meta-llama/Llama-2-13b-hf": "llama-2-13b",
    "huggyllama/llama-30b": "llama-30b",
}


def load_model_config(name: str) -> Any:
    """The transformers configuration of a model.

    Args:
        name: a built-in shape, a `config.json` or the folder it is in, or a model of the Hugging Face hub, whose
            config.json alone is fetched.

    Raises:
        ValueError: there is none of that name, or it is no causal language model.
    """
    if not Path(name).exists():
        name = CHECKPOINTS.get(name, name)
        if name in MODELS:
            return MODELS[name].config()
    try:
        # Code of strangers is not run for an estimate.
        config = load_pretrained("AutoConfig", "the configuration of", name, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"--model {name!r} is neither a built-in shape ({', '.join(MODELS)}), nor a folder or file with a "
            f"transformers configuration, nor a model that can be fetched: {error}"
        ) from error
    causal = load_extra("transformers.models.auto.modeling_auto", "hf", "overcoat estimate")
    if config.model_type not in causal.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"--model {name!r} is a {config.model_type} model, no causal language model of transformers")
    return config
