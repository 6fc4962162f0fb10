"""The weights of a converted model that `stream` keeps in host memory, and whether they fit there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from overcoat.distributed.fp8_all_gather import fp8_stacks, fsdp_params
from overcoat.kernels.blockwise import BLOCK
from overcoat.models.decoder import Fp8DecoderLayer
from overcoat.models.lora import base_of
from overcoat.optim.adamw import AdamW
from overcoat.optim.state import bytes_to_offload
from overcoat.pinned_memory import bytes_free
from overcoat.streaming.layers import Layer, PlainStack, Stack
from overcoat.streaming.sharded import ShardedPlainStack, ShardedStack, rows_of, tightest_host

# Weights that are used in 16 bits stay on the device if they are smaller.
LEAST_BYTES = 2**20


def streamed_layers(model: nn.Module, resident: int = 0) -> tuple[list[Layer], dict[str, str]]:
    """Return the layers of a converted model that are streamed, all but `resident` ones, and why other weights of
    theirs cannot be.

    The first layer is the first to stay: the forward then waits for no weights that have just been stepped.
    """
    layers: list[Layer] = []
    left, shared, held = dict[str, str](), _shared(model), fsdp_params(model)
    make: Any = functools.partial(ShardedStack, held) if held else Stack
    for path, module in model.named_modules():
        if not isinstance(module, Fp8DecoderLayer):
            continue
        names = {id(each): f"{path}.{name}.weight".removeprefix(".") for name, each in module.named_modules()}
        stacks = []
        scaling = module.overcoat_recipe.linear_scaling
        for modules, reason in fp8_stacks(module, functools.partial(_rows, shared, held, scaling)):
            own = [names[id(base_of(each))] for each in modules]
            if reason is None:
                stacks.append(make(modules, own, scaling))
            else:
                left.update(dict.fromkeys(own, reason))
        if stacks:
            others = {id(param) for stack in stacks for param in stack.params} | shared
            stacks += _plain_stacks(module, path, others, held)
            for name in [name for stack in stacks for name in stack.names]:
                left.pop(name, None)
            layers.append(Layer(len(layers), path, module, stacks))
    if isinstance(resident, bool) or not isinstance(resident, int) or not 0 <= resident < max(len(layers), 1):
        raise ValueError(f"stream: resident {resident!r} must be a number of layers, from 0 to {len(layers) - 1}")
    stay = {place * len(layers) // resident for place in range(resident)}
    layers = [layer for layer in layers if layer.number not in stay]
    for number, layer in enumerate(layers):
        layer.number = number
    return layers, left


def _plain_stacks(layer: nn.Module, path: str, others: set[int], held: Any) -> list[Stack]:
    """Return the other large weights of a layer, by module; others: ids of weights that are no part of them."""
    stacks: list[Stack] = []
    make: Any = functools.partial(ShardedPlainStack, held) if held else PlainStack
    for name, module in layer.named_modules():
        large = [
            key
            for key, param in module._parameters.items()
            if param is not None
            and id(param) not in others
            and param.nbytes >= LEAST_BYTES
            and param.dim() > 1
            and not (held and isinstance(rows_of(held, module, key), str))
        ]
        if large:
            own = [".".join(filter(None, (path, name, key))) for key in large]
            stacks.append(make([module] * len(large), own, "tensor"))
    return stacks


def _shared(model: nn.Module) -> set[int]:
    """Return the ids of parameters that several modules have."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                (shared if id(param) in seen else seen).add(id(param))
    return shared


def _rows(shared: set[int], held: Any, scaling: str, module: Any) -> tuple[int, int] | str:
    """Return the rows of a module's weight and 1, or why it cannot be streamed (`fp8_stacks`)."""
    if id(module.weight) in shared:
        return "another module has the same weight"
    unit = BLOCK if scaling == "block" else 1
    return rows_of(held, module, unit=unit) if held else (len(module.weight), 1)


def check_host(layers: Sequence[Layer], optimizer: AdamW) -> None:
    """Raise ValueError if the host has too little memory for streamed layers, of a model on any device."""
    stacks = [stack for layer in layers for stack in layer.stacks]
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    stepped = [param for stack in stacks for param in stack.params if param.requires_grad]
    needs = {
        "weights": sum(stack.bytes for stack in stacks if stack.params[0].device.type != "cpu"),
        "FP8 codes": sum(stack.code_bytes for stack in stacks),
        "optimizer states": sum(bytes_to_offload(param, groups[id(param)]) for param in stepped),
    }
    processes, free = tightest_host(stacks[0], bytes_free())
    needed = processes * sum(needs.values())
    if free and needed > free:
        listed = ", ".join(f"{name} {processes * size / 2**30:.1f}" for name, size in needs.items())
        raise ValueError(
            f"overcoat.stream needs {needed / 2**30:.1f} GiB more host memory ({listed}), and {free / 2**30:.1f} GiB "
            "are free, of the host or within the container's limit: add memory, or train a smaller model"
        )
