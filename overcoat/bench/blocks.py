"""Who takes part in `overcoat bench layer`: name -> a decoder block with the weights of the same transformers layer.

    overcoat ...             `overcoat.convert` under a recipe, eager; under torch.compile
    overcoat torch checkpoint
                             `Recipe()` inside `torch.utils.checkpoint`, which keeps the input in 16 bits and
                             runs all of the forward again; beside it, what "leanest" saves. Its backward
                             frees nothing before its end, as it saves through hooks of others
    bf16 ...                 the transformers layer as it is, eager and under torch.compile
    ... graphs               torch.compile(mode="reduce-overhead"): forward and backward as CUDA graphs, without the
                             host, which is what a small block waits for
    torchao ...              its float8 training recipes under torch.compile
    transformer engine ...   its TransformerLayer under its FP8 recipes

BF16 and torchao take PyTorch's attention; `attention="cudnn"` puts cuDNN's first, the fastest on Hopper.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import overcoat
from overcoat import Recipe
from overcoat.bench.transformer_engine import TransformerEngineBlock

Tables = tuple[Tensor, Tensor]
# In the order in which they are tried; a shape that a backend cannot do goes to the next.
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass
class Block:
    """A block to run: what owns its parameters, the call, its gradients under the transformers layer's names."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]
    gradients: Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Maker:
    """How a block is made, and the packages it needs.

    `compiles`, `graphs`: torch.compile is part of its name; `delayed`: its scales are those of the steps before;
    `checkpointed`: it is called inside PyTorch's activation checkpoint.
    """

    make: Callable[[Any], Any]
    needs: tuple[str, ...] = ()
    compiles: bool = False
    torch_attention: bool = False
    graphs: bool = False
    delayed: bool = False
    checkpointed: bool = False


OUR_RECIPES = {
    "overcoat": Recipe(),
    "overcoat attention bf16": Recipe(kept_attention="bf16"),
    "overcoat paper": Recipe.paper(),
    "overcoat leanest": Recipe.leanest(),
    "overcoat e4m3 gradients": Recipe(grad_format="e4m3"),
    "overcoat block scaling": Recipe(linear_scaling="block"),
}


def makers() -> dict[str, Maker]:
    """Everyone by name, in the order of the table."""
    found = {name: Maker(_converted(recipe)) for name, recipe in OUR_RECIPES.items()}
    found["overcoat torch checkpoint"] = Maker(_converted(Recipe()), checkpointed=True)
    found["overcoat compile"] = Maker(_converted(Recipe()), compiles=True)
    found["overcoat compile, graphs"] = Maker(_converted(Recipe()), compiles=True, graphs=True)
    found["bf16 eager"] = Maker(lambda model: model.layers[0], torch_attention=True)
    found["bf16 compile"] = Maker(lambda model: model.layers[0], compiles=True, torch_attention=True)
    found["bf16 compile, graphs"] = Maker(lambda model: model.layers[0], (), True, True, True)
    for recipe in ("tensorwise", "rowwise"):
        found[f"torchao {recipe}, compile"] = Maker(_torchao(recipe), ("torchao",), True, True)
    for recipe in ("delayed", "current", "block"):
        make = _transformer_engine(recipe)
        found[f"transformer engine {recipe}"] = Maker(make, ("transformer_engine",), delayed=recipe == "delayed")
    return found


def make_block(name: str, model: Any, tables: Tables, compiled: bool, attention: str) -> Block:
    """The contestant `name`, made out of `model`, which it may change.

    Args:
        model: a transformers model of one layer.
        tables: cos and sin, (1, sequence, head_dim).
        compiled: False leaves torch.compile out, for accuracy alone.
        attention: "cudnn" or "default": PyTorch's order of attention backends.
    """
    maker = makers()[name]
    layer = maker.make(model)
    mode = "reduce-overhead" if maker.graphs else "default"
    runner = torch.compile(layer, mode=mode) if compiled and maker.compiles else layer
    if maker.checkpointed:
        runner = functools.partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
    cudnn_first = maker.torch_attention and attention == "cudnn"

    def call(x: Tensor) -> Tensor:
        order = sdpa_kernel(CUDNN_FIRST, set_priority=True) if cudnn_first else contextlib.nullcontext()
        with order:
            y = runner(x, attention_mask=None, position_embeddings=tables)
        return y[0] if isinstance(y, tuple) else y

    return Block(layer, call, getattr(layer, "gradients", None) or (lambda: named_gradients(layer)))


def named_gradients(layer: nn.Module) -> dict[str, Tensor]:
    """Gradient of every parameter that has one."""
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def _converted(recipe: Recipe) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        convert_all(model, recipe)
        return model.layers[0]

    return make


def convert_all(model: Any, recipe: Recipe) -> None:
    """`overcoat.convert`; ValueError if it leaves a layer or the head alone, whose figures would not be its own."""
    report = overcoat.convert(model, recipe)
    if report.left_alone or (report.head is not None and not report.head.converted):
        raise ValueError(f"not converted:\n{report}")


def _torchao(recipe: str) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        return convert_to_float8_training(model.layers[0], config=Float8LinearConfig.from_recipe_name(recipe))

    return make


def _transformer_engine(recipe: str) -> Callable[[Any], Any]:
    return lambda model: TransformerEngineBlock(model.layers[0], recipe, model.config.max_position_embeddings)
