"""Decoder blocks and models of random weights: what the benchmarks build, out of `overcoat.models.shapes.MODELS`."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import torch

from overcoat.extras import load_extra
from overcoat.models.dummy_batch import model_class
from overcoat.models.family import decoder_layers
from overcoat.models.shapes import MODELS, Model

# Short names of models in `--shapes`.
SHORT = {"1b": "coat-1b", "7b": "llama-2-7b", "llama3-8b": "llama-3-8b", "13b": "llama-2-13b", "30b": "llama-30b"}
# Routers of experts, and the factors of their first row to their last.
ROUTERS, UNEVEN = (".gate.weight", ".router.weight"), (0.7, 1.4)


class BlockShape(NamedTuple):
    """One decoder block of a model, and the batch and sequence it runs on; kind: of the configuration's `layer_types`,
    "" for the first layer's."""

    model: Model
    batch: int
    sequence: int
    kind: str = ""


def block_shape(name: str) -> BlockShape:
    """The block "MODEL[.KIND][-sTOKENS]": KIND of its layers, where they differ; 2048 tokens in a row unless it says
    how many."""
    match = re.fullmatch(r"(.+?)(?:\.([a-z]+_[a-z_]+))?(?:-s([1-9][0-9]*))?", name)
    model = MODELS.get(SHORT.get(match[1], match[1])) if match else None
    if match is None or model is None:
        names = ", ".join([*MODELS, *SHORT])
        raise ValueError(f"unknown shape {name!r}; choose MODEL[.KIND][-sTOKENS] of {names}")
    if match[2] and match[2] not in (kinds := kinds_of(model.config().get_text_config())):
        raise ValueError(f"unknown shape {name!r}: {match[1]} has layers of {', '.join(kinds) or 'one kind'}")
    return BlockShape(model, model.batch, int(match[3] or 2048), match[2] or "")


def kinds_of(config: Any) -> list[str]:
    """The kinds of a model's layers, as transformers names them."""
    return [*dict.fromkeys(getattr(config, "layer_types", None) or ())]


def keep_one_layer(config: Any, kind: str = "") -> Any:
    """Change a configuration to its first layer of a kind alone. Some classes refuse to be made with one kind."""
    kinds = getattr(config, "layer_types", None) or [""]
    index = kinds.index(kind) if kind else 0
    if getattr(config, "is_heterogeneous", False):  # layers of several sizes
        config = config.per_layer_config[index]
    for name in ("layer_types", "no_rope_layers"):  # a value for each layer
        if value := getattr(config, name, None):
            setattr(config, name, [value[index]])
    if getattr(config, "num_kv_shared_layers", 0):
        config.num_kv_shared_layers = 0
    config.num_hidden_layers = 1
    return config


def head_dim(config: Any) -> int:
    """Columns of an attention head, which some configurations say and others imply."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def build_block(shape: BlockShape, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """A transformers model of one layer with random weights, the same for the same seed, and what it gives its layer
    beside the input: rotary tables, masks. At the usual ones and zeros of norms and biases an error would not show."""
    transformers = load_extra("transformers", "hf", "a model")
    torch.manual_seed(seed)
    config = keep_one_layer(shape.model.config().get_text_config(), shape.kind)
    with torch.device(device):
        model = transformers.AutoModel.from_config(config, dtype=dtype).train()
        ids = torch.zeros((shape.batch, shape.sequence), dtype=torch.int64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ROUTERS):  # experts' loads are uneven: a longer row has larger logits
                parameter.mul_(torch.linspace(*UNEVEN, len(parameter), device=device)[:, None])
            if "norm" in name:
                parameter.uniform_(0.2, 1.8)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    inputs: dict[str, Any] = {}
    (layer,) = decoder_layers(model).values()
    names = [*inspect.signature(layer.forward).parameters][1:]

    def note(_layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        caught = dict(zip(names, given[1:], strict=False), **named)
        inputs.update({name: dict(each) if type(each) is dict else each for name, each in caught.items()})

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
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
