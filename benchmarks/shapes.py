"""Decoder blocks and models of random weights: what the benchmarks build, out of `overcoat.models.shapes.MODELS`."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from overcoat.extras import load_extra
from overcoat.models.dummy_batch import model_class
from overcoat.models.family import decoder_layers
from overcoat.models.shapes import MODELS, Model

# Short names of models in `--shapes`.
SHORT = {"1b": "coat-1b", "7b": "llama-2-7b", "llama3-8b": "llama-3-8b", "13b": "llama-2-13b", "30b": "llama-30b"}


class BlockShape(NamedTuple):
    """One decoder block of a model, and the batch and sequence it runs on."""

    model: Model
    batch: int
    sequence: int


def block_shape(name: str) -> BlockShape:
    """The block "MODEL" or "MODEL-sTOKENS", with 2048 tokens in a row unless it says how many."""
    match = re.fullmatch(r"(.+?)(?:-s([1-9][0-9]*))?", name)
    model = MODELS.get(SHORT.get(match[1], match[1])) if match else None
    if match is None or model is None:
        names = ", ".join([*MODELS, *SHORT])
        raise ValueError(f"unknown shape {name!r}; choose MODEL or MODEL-sTOKENS of {names}")
    return BlockShape(model, model.batch, int(match[2] or 2048))


def head_dim(config: Any) -> int:
    """Columns of an attention head, which some configurations say and others imply."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def build_block(shape: BlockShape, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """A transformers model of one layer with random weights, the same for the same seed, and what it gives its layer
    beside the input: rotary tables, masks. At the usual ones and zeros of norms and biases an error would not show."""
    transformers = load_extra("transformers", "hf", "a model")
    torch.manual_seed(seed)
    config = shape.model.changed(num_hidden_layers=1).config().get_text_config()
    with torch.device(device):
        model = transformers.AutoModel.from_config(config, dtype=dtype).train()
        ids = torch.zeros((shape.batch, shape.sequence), dtype=torch.int64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.2, 1.8)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    inputs: dict[str, Any] = {}
    (layer,) = decoder_layers(model).values()
    handle = layer.register_forward_pre_hook(lambda *given: inputs.update(given[2]), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    handle.remove()
    return model, inputs


def build_model(model: Model, dtype: torch.dtype, device: str) -> Any:
    """A whole transformers model, random weights made on the device, in training mode."""
    config = model.config()
    torch.manual_seed(0)
    with torch.device(device):
        return model_class(config)._from_config(config, dtype=dtype).train()
