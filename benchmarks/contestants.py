"""Contestants: `ENGINES` run the decoder layers of `layer`, `TRAINERS` take the whole steps of `model`.

    overcoat ...             `overcoat.convert` under a recipe, eager; compiled; as CUDA graphs
    bf16 ...                 the transformers layer as it is, eager and compiled
    torchao ...              its float8 training recipes on every linear layer, compiled
    transformer engine ...   its TransformerLayer under its FP8 recipes

"compile" is torch.compile layer by layer; "graphs" with mode="reduce-overhead": CUDA graphs. BF16 and torchao take
PyTorch's attention, cuDNN's first, the fastest on Hopper. In whole models peers get the best parts that can be
assembled: liger-kernel's fused linear cross-entropy where it is installed, and the optimizer their name says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import overcoat
from benchmarks.optimizer import OPTIMIZERS
from benchmarks.session import is_installed
from benchmarks.transformer_engine import use_transformer_engine
from overcoat import Recipe
from overcoat.estimate.command import parse_recipe
from overcoat.models.compiled import compile_layers
from overcoat.models.dummy_batch import sees
from overcoat.models.family import decoder_layers
from overcoat.models.head import why_head_unsupported
from overcoat.models.masks import nothing_hidden

Context = Callable[[], AbstractContextManager[Any]]


class Engine(NamedTuple):
    """How decoder layers are run. change: changes a model's layers in place; returns the context that they are to be
    called in. needs: packages. compile: the model's layers, in place. graphs: they are CUDA graphs. delayed: scales are
    those of the steps before. recipe: of ours."""

    change: Callable[[Any], Context]
    needs: tuple[str, ...] = ()
    compile: Callable[[Any], None] | None = None
    graphs: bool = False
    delayed: bool = False
    recipe: Recipe | None = None


def cudnn_first() -> AbstractContextManager[Any]:
    """Return PyTorch's attention, in this order: a shape that a backend cannot do goes to the next."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def overcoat_engine(recipe: Recipe, **options: Any) -> Engine:
    """`overcoat.convert`; ValueError if it leaves a layer or the head alone, whose figures would not be its own."""

    def change(model: Any) -> Context:
        report = overcoat.convert(model, recipe)
        if report.left_alone or (report.head is not None and not report.head.converted):
            raise ValueError(f"not converted:\n{report}")
        return contextlib.nullcontext

    return Engine(change, recipe=recipe, **options)


def torchao_engine(recipe: str) -> Engine:
    def change(model: Any) -> Context:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        if recipe == "tensorwise" and torch.distributed.is_initialized():
            config = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
        for layer in decoder_layers(model).values():
            convert_to_float8_training(layer, config=config)
        return cudnn_first

    return Engine(change, ("torchao",), compile_peer)


def transformer_engine(recipe: str) -> Engine:
    change = functools.partial(use_transformer_engine, recipe=recipe)
    return Engine(change, ("transformer_engine",), delayed=recipe == "delayed")


def compile_peer(model: Any, mode: str | None = None) -> None:
    layers = decoder_layers(model).values()
    # One entry per layer at worst; beyond the limit layers would silently run eager.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(layers))
    for layer in layers:
        layer.compile(mode=mode)


compile_ours = functools.partial(compile_layers, graphs=False)
AS_GRAPHS: dict[str, Any] = {"compile": functools.partial(compile_layers, graphs=True), "graphs": True}
OVERCOAT = "overcoat"
PAPER = f"{OVERCOAT} paper"
OUR_RECIPES = {
    OVERCOAT: Recipe(),
    "overcoat attention bf16": Recipe(kept_attention="bf16"),
    PAPER: Recipe.paper(),
    "overcoat leanest": Recipe.leanest(),
    "overcoat e4m3 gradients": Recipe(grad_format="e4m3"),
    "overcoat block scaling": Recipe(linear_scaling="block"),
}
BF16 = Engine(lambda _: cudnn_first)
ENGINES = {
    **{name: overcoat_engine(recipe) for name, recipe in OUR_RECIPES.items()},
    "overcoat compile": overcoat_engine(Recipe(), compile=compile_ours),
    "overcoat compile, graphs": overcoat_engine(Recipe(), **AS_GRAPHS),
    "bf16 eager": BF16,
    "bf16 compile": BF16._replace(compile=compile_peer),
    "bf16 compile, graphs": BF16._replace(compile=functools.partial(compile_peer, mode="reduce-overhead"), graphs=True),
    **{f"torchao {recipe}, compile": torchao_engine(recipe) for recipe in ("tensorwise", "rowwise")},
    **{f"transformer engine {recipe}": transformer_engine(recipe) for recipe in ("delayed", "current", "block")},
}


# ---- a decoder block ----------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A block to run: what owns its parameters, the call, its gradients under the transformers layer's names."""

    layer: nn.Module
    call: Callable[[Tensor], Tensor]
    gradients: Callable[[], dict[str, Tensor]]


def make_block(name: str, model: Any, inputs: dict[str, Any], compiled: bool = True, attention: str = "cudnn") -> Block:
    """The contestant `name`, made out of `model` of one layer, which it may change; inputs: what it gives the layer
    beside x; compiled: False leaves torch.compile out, for accuracy alone; attention: "cudnn" first, or "default"."""
    engine, (place,) = ENGINES[name], decoder_layers(model)
    context = engine.change(model)
    if context is cudnn_first and attention == "default":
        context = contextlib.nullcontext
    if compiled and engine.compile:
        engine.compile(model)
    layer: Any = model.get_submodule(place)
    if engine.recipe is not None and inputs.get("attention_mask") is not None:
        inputs = {**inputs, "attention_mask": nothing_hidden(inputs["attention_mask"].device)}  # as our head says it

    def call(x: Tensor) -> Tensor:
        # Gemma 4's layers leave k and v in a dictionary, which would keep one call's graph alive through the next.
        fresh = {name: dict(each) if type(each) is dict else each for name, each in inputs.items()}
        with context():
            return layer(x, **fresh)

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}

    return Block(layer, call, getattr(layer, "gradients", gradients))


# ---- whole steps --------------------------------------------------------------------------------------------------

OURS_8BIT = "overcoat 8bit, bf16+8"


class Trainer(NamedTuple):
    """A contestant: how its layers run, its optimizer (one of `OPTIMIZERS`), whether gradients are released to it,
    whether its weights travel in FP8 between GPUs, whether its layers are streamed from host memory, and how many
    stay. offloads: weights, gradients and states are in host memory by FSDP2, and layers are checkpointed."""

    engine: Engine
    optimizer: str = OURS_8BIT
    released: bool = False
    fp8_all_gather: bool = False
    streamed: bool = False
    resident: int = 0
    offloads: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return self.engine.needs + OPTIMIZERS[self.optimizer].needs

    def prepare(self, model: Any, sharded: bool = False) -> tuple[Callable[[dict[str, Any]], Tensor], Any]:
        """Change the model, on the GPU, or on the meta device if it is streamed; (its inputs, labels among them ->
        loss), optimizer. sharded: by FSDP2 over the process group, layer by layer."""
        layers = list(decoder_layers(model))
        context = self.engine.change(model)
        if self.engine.compile:
            self.engine.compile(model)
        forward = loss_function(model, context)
        if self.offloads:  # what runs again takes the same attention
            again = {"context_fn": lambda: (contextlib.nullcontext(), context())}
            model.gradient_checkpointing_enable({"use_reentrant": False, **again})
        if sharded:
            policy = CPUOffloadPolicy(torch.cuda.is_available()) if self.offloads else OffloadPolicy()
            for part in (*map(model.get_submodule, layers), model):
                fully_shard(part, offload_policy=policy)
        if self.fp8_all_gather:
            overcoat.fp8_all_gather(model)
        optimizer = OPTIMIZERS[self.optimizer].make([each for each in model.parameters() if each.requires_grad])
        if sharded and self.engine is TORCHAO:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            # All weights' maxima in one all-reduce, instead of one each.
            optimizer.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))
        if self.streamed:
            is_meta = any(each.is_meta for each in model.parameters())
            overcoat.stream(model, optimizer, resident=self.resident, weights="random" if is_meta else None)
        elif self.released and isinstance(optimizer, overcoat.AdamW):
            overcoat.release_gradients(model, optimizer)
        elif self.released:
            importlib.import_module("flashoptim").enable_gradient_release(model, optimizer)
        return forward, optimizer


# How `trainer_of` knows a recipe, and what may follow it: gradients released, CUDA graphs, weights in BF16 alone,
# layers streamed (and ", 8 resident").
CUSTOM = "overcoat recipe "
WAYS = ("", ", released", ", graphs", ", graphs, released", ", bf16 w.", ", bf16 w., graphs", ", streamed")
OURS, LEANEST = ENGINES["overcoat"], ENGINES["overcoat leanest"]
TORCH, FLASH = "torch fused BF16", "FlashAdamW 24-bit"
TORCHAO = ENGINES["torchao tensorwise, compile"]
TRAINERS = {
    **{name: Trainer(ENGINES[name]) for name in OUR_RECIPES},
    "overcoat fp8 all-gather": Trainer(OURS, fp8_all_gather=True),
    "overcoat graphs": Trainer(ENGINES["overcoat compile, graphs"]),
    PAPER: Trainer(ENGINES[PAPER], "overcoat fp8, bf16+8"),
    "overcoat fp8 head": Trainer(overcoat_engine(Recipe(head="fp8"))),
    "overcoat bf16 weights": Trainer(OURS, "overcoat 8bit, bf16"),
    "overcoat released": Trainer(OURS, released=True),
    "overcoat compile, released": Trainer(ENGINES["overcoat compile"], released=True),
    "overcoat leanest, released": Trainer(LEANEST, released=True),
    "overcoat leanest, bf16 w., released": Trainer(LEANEST, "overcoat 8bit, bf16", released=True),
    "overcoat leanest, streamed": Trainer(LEANEST, streamed=True),
    "overcoat leanest, offload, released": Trainer(LEANEST, "overcoat 8bit, bf16+8, offload", released=True),
    "bf16 eager, torch AdamW": Trainer(BF16, TORCH),
    "bf16 eager, torch AdamW, FSDP2 CPU offload": Trainer(BF16, TORCH, offloads=True),
    "bf16 compile, torch AdamW": Trainer(ENGINES["bf16 compile"], TORCH),
    "bf16 compile, graphs, torch AdamW": Trainer(ENGINES["bf16 compile, graphs"], TORCH),
    "bf16 compile, FlashAdamW": Trainer(ENGINES["bf16 compile"], FLASH),
    "torchao tensorwise, torch AdamW": Trainer(TORCHAO, TORCH),
    "torchao tensorwise, FlashAdamW": Trainer(TORCHAO, FLASH),
    "torchao tensorwise, FlashAdamW rel.": Trainer(TORCHAO, FLASH, released=True),
    "torchao tensorwise, AdamWFp8": Trainer(TORCHAO, "torchao AdamWFp8"),
    "transformer engine delayed, FlashAdamW": Trainer(ENGINES["transformer engine delayed"], FLASH),
    "transformer engine current, FlashAdamW": Trainer(ENGINES["transformer engine current"], FLASH),
}


def trainer_of(name: str) -> Trainer:
    """One of `TRAINERS`, or "overcoat recipe NAME FIELD=VALUE ..." under that recipe, with one of `WAYS` at its end.
    ValueError: there is no such recipe."""
    if name in TRAINERS or not name.startswith(CUSTOM):
        return TRAINERS[name]
    recipe, *ways = name.removeprefix(CUSTOM).split(", ")
    resident = int(ways.pop().split()[0]) if re.fullmatch(r"[0-9]+ resident", ways[-1] if ways else "") else 0
    if "".join(f", {way}" for way in ways) not in WAYS:
        raise ValueError(f"{name!r} ends in none of {', '.join(map(repr, WAYS))}")
    engine = overcoat_engine(parse_recipe(recipe.split()), **(AS_GRAPHS if "graphs" in ways else {}))
    optimizer = "overcoat 8bit, bf16" if "bf16 w." in ways else OURS_8BIT
    return Trainer(engine, optimizer, "released" in ways, streamed="streamed" in ways, resident=resident)


def loss_function(model: Any, context: Context) -> Callable[[dict[str, Any]], Tensor]:
    """A model's inputs -> loss: of a converted model its own, of others liger-kernel's fused one where it is installed
    and computes the same, else the model's own. It is called as the model, whose hooks gather its weights."""
    is_ours = context is contextlib.nullcontext
    known = why_head_unsupported(model) is None and not sees(model.config)
    if not is_ours and is_installed("liger_kernel") and known:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()

        def fused(input_ids: Tensor, labels: Tensor, use_cache: bool) -> SimpleNamespace:
            hidden = model.base_model(input_ids=input_ids, use_cache=use_cache).last_hidden_state
            # Every position but a sequence's last one predicts the next token.
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            value = loss(model.get_output_embeddings().weight, hidden.flatten(0, 1), labels.flatten())
            return SimpleNamespace(loss=value)

        model.forward = fused

    def run(inputs: dict[str, Any]) -> Tensor:
        with context():
            return model(**inputs, use_cache=False).loss

    return run
