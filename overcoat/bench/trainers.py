"""Who takes part in `overcoat bench model`: name -> a whole model that takes real optimizer steps.

    overcoat ...                `overcoat.convert` and `overcoat.AdamW`, plain transformers code; graphs: as
                                `train.compile = "graphs"`
    bf16 eager | compile, ...   the transformers model; torch.compile per decoder layer, as people do; graphs: with
                                mode="reduce-overhead"
    torchao tensorwise, ...     its float8 training on every linear layer of the blocks, compiled per layer
    transformer engine ..., ... its TransformerLayer in place of every decoder layer

Peers get the best parts that can be assembled: liger-kernel's fused linear cross-entropy where it is installed, cuDNN's
attention first, and the optimizer their name says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

import overcoat
from overcoat import Recipe
from overcoat.bench.blocks import CUDNN_FIRST, OUR_RECIPES, convert_all
from overcoat.bench.session import is_installed
from overcoat.bench.transformer_engine import TransformerEngineBlock
from overcoat.models.compiled import compile_layers

LR = 1e-5


@dataclass(frozen=True)
class Trainer:
    """A contestant. Both functions are given the model on the GPU; the first may change it.

    Attributes:
        prepare: model -> (input ids (batch, sequence) -> loss).
        optimizer: model -> optimizer.
        needs: packages it cannot do without.
        graphs: its layers are CUDA graphs: each pass begins with `begin_pass`, and memory counts from the first on.
    """

    prepare: Callable[[Any], Callable[[Tensor], Tensor]]
    optimizer: Callable[[Any], Any]
    needs: tuple[str, ...] = ()
    graphs: bool = False


def trainers() -> dict[str, Trainer]:
    """Everyone by name, in the order of the table."""
    found = {name: Trainer(_converted(recipe), _adamw()) for name, recipe in OUR_RECIPES.items()}
    found["overcoat graphs"] = Trainer(_converted(Recipe(), graphs=True), _adamw(), graphs=True)
    found["overcoat paper"] = Trainer(_converted(Recipe.paper()), _adamw(moments="fp8"))
    found["overcoat fp8 head"] = Trainer(_converted(Recipe(head="fp8")), _adamw())
    found["overcoat bf16 weights"] = Trainer(_converted(Recipe()), _adamw(master="bf16"))
    found["overcoat released"] = Trainer(_converted(Recipe()), _adamw(released=True))
    leanest = _converted(Recipe.leanest())
    found["overcoat leanest, released"] = Trainer(leanest, _adamw(released=True))
    found["overcoat leanest, bf16 w., released"] = Trainer(leanest, _adamw(released=True, master="bf16"))
    found["overcoat leanest, offload, released"] = Trainer(leanest, _adamw(released=True, offload=True))
    flash, released = _flash(), _flash(released=True)
    compiled, tensorwise = _transformers(compiled=True), _transformers(compiled=True, torchao="tensorwise")
    found["bf16 eager, torch AdamW"] = Trainer(_transformers(compiled=False), _torch_adamw)
    found["bf16 compile, torch AdamW"] = Trainer(compiled, _torch_adamw)
    replayed = _transformers(compiled=True, graphs=True)
    found["bf16 compile, graphs, torch AdamW"] = Trainer(replayed, _torch_adamw, graphs=True)
    found["bf16 compile, FlashAdamW"] = Trainer(compiled, flash, ("flashoptim",))
    found["torchao tensorwise, torch AdamW"] = Trainer(tensorwise, _torch_adamw, ("torchao",))
    found["torchao tensorwise, FlashAdamW"] = Trainer(tensorwise, flash, ("torchao", "flashoptim"))
    found["torchao tensorwise, FlashAdamW rel."] = Trainer(tensorwise, released, ("torchao", "flashoptim"))
    found["torchao tensorwise, AdamWFp8"] = Trainer(tensorwise, _adamw_fp8, ("torchao",))
    for recipe in ("delayed", "current"):
        needs = ("transformer_engine", "flashoptim")
        found[f"transformer engine {recipe}, FlashAdamW"] = Trainer(_transformer_engine(recipe), flash, needs)
    return found


# ---- ours ---------------------------------------------------------------------------------------------------------


def _converted(recipe: Recipe, graphs: bool = False) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    def prepare(model: Any) -> Callable[[Tensor], Tensor]:
        convert_all(model, recipe)
        if graphs:
            compile_layers(model, graphs=True)
        return lambda ids: model(input_ids=ids, labels=ids).loss

    return prepare


def _adamw(released: bool = False, **options: Any) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        optimizer = overcoat.AdamW(model.parameters(), lr=LR, **options)
        if released:
            overcoat.release_gradients(model, optimizer)
        return optimizer

    return make


# ---- peers --------------------------------------------------------------------------------------------------------


def _transformers(
    compiled: bool, torchao: str | None = None, graphs: bool = False
) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    def prepare(model: Any) -> Callable[[Tensor], Tensor]:
        if torchao is not None:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(model.model, config=Float8LinearConfig.from_recipe_name(torchao))
        if compiled:
            layers = model.model.layers
            # One entry per layer at worst; beyond the limit layers would silently run eager.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(layers))
            for layer in layers:
                layer.compile(mode="reduce-overhead" if graphs else None)
        return _forward(model, lambda: sdpa_kernel(CUDNN_FIRST, set_priority=True))

    return prepare


def _transformer_engine(recipe: str) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    def prepare(model: Any) -> Callable[[Tensor], Tensor]:
        layers = model.model.layers
        for index, layer in enumerate(layers):
            layers[index] = TransformerEngineBlock(layer, recipe, model.config.max_position_embeddings, inside=True)
            layers[index].frequencies = layers[0].frequencies
        return _forward(model, layers[0].context)

    return prepare


def _forward(model: Any, context: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    """The loss through liger-kernel's fused linear cross-entropy, or through the model's own if it is not installed."""
    if not is_installed("liger_kernel"):

        def own(ids: Tensor) -> Tensor:
            with context():
                return model(input_ids=ids, labels=ids, use_cache=False).loss

        return own

    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()

    def fused(ids: Tensor) -> Tensor:
        with context():
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        # Every position but a sequence's last one predicts the next token.
        labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        return loss(model.lm_head.weight, hidden.flatten(0, 1), labels.flatten())

    return fused


def _torch_adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def _adamw_fp8(model: Any) -> Any:
    from torchao.optim import AdamWFp8

    return AdamWFp8(model.parameters(), lr=LR)


def _flash(released: bool = False) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        from flashoptim import FlashAdamW, enable_gradient_release

        optimizer = FlashAdamW(model.parameters(), lr=LR, master_weight_bits=24)
        if released:
            enable_gradient_release(model, optimizer)
        return optimizer

    return make
