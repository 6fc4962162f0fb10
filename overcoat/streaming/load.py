"""Weights of a model on the meta device: random ones, or those of a checkpoint folder, tensor by tensor.

The GPU holds one stack of layers' weights at a time, and the host each weight once, in its page-locked buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overcoat.extras import load_extra
from overcoat.models.decoder import Fp8DecoderLayer
from overcoat.optim.sharding import first_row, local, rewrap

RANDOM = "random"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def set_data(param: nn.Parameter, data: Tensor) -> None:
    """Give a parameter other memory; it stays the same object, also if it is on the meta device or sharded."""
    if param.is_meta or isinstance(data, DTensor):
        torch.utils.swap_tensors(param, nn.Parameter(data, requires_grad=param.requires_grad))
    else:
        param.data = data


class Checkpoint:
    """Tensors of the safetensors files of a folder, by their names; mapped, and read one by one."""

    def __init__(self, folder: str | Path, names: Iterable[str]) -> None:
        self.folder = Path(folder)
        self.places = self._places()
        if missing := [name for name in names if name not in self.places]:
            raise ValueError(
                f"overcoat.stream: {self.folder} does not hold {missing[0]} and {len(missing) - 1} more by these "
                "names: load the model with from_pretrained in host memory, and leave weights= out"
            )

    def _places(self) -> dict[str, str]:
        safetensors = load_extra("safetensors", "hf", "reading weights")
        if (self.folder / INDEX).is_file():
            found: dict[str, str] = json.loads((self.folder / INDEX).read_text())["weight_map"]
            return found
        if not (self.folder / SINGLE).is_file():
            raise ValueError(f"overcoat.stream: weights={str(self.folder)!r} has neither {INDEX} nor {SINGLE}")
        with safetensors.safe_open(self.folder / SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)

    def read(self, name: str, target: Tensor) -> None:
        """Copy a tensor, or this process' rows if the target is sharded, in the target's dtype."""
        safetensors = load_extra("safetensors", "hf", "reading weights")
        with safetensors.safe_open(self.folder / self.places[name], "pt") as file:
            found, own, start = file.get_slice(name), local(target), first_row(target)
            if (shape := tuple(found.get_shape())) != tuple(target.shape):
                shapes = f"{shape}, not {tuple(target.shape)}"
                raise ValueError(f"overcoat.stream: {name} of {self.folder} is {shapes}")
            if own.numel():
                own.copy_(found[start : start + len(own)] if own.dim() else file.get_tensor(name))


class Source:
    """The source of the weights of a model on the meta device; `weights`: a folder, or "random"."""

    def __init__(self, model: Any, weights: Optional[str | Path]) -> None:
        self.model = model
        self.is_meta = any(param.is_meta for param in model.parameters())
        if self.is_meta != (weights is not None):
            what = "has no weights: say where they come from, in" if self.is_meta else "has weights: leave out"
            raise ValueError(f'overcoat.stream: {type(model).__name__} {what} weights="random", or a folder')
        if weights == RANDOM and any(isinstance(param, DTensor) for param in model.parameters()):
            raise ValueError(
                'overcoat.stream: weights="random" draws whole weights, and this model is sharded: save a model drawn '
                "on one GPU, and give its folder"
            )
        if self.is_meta and not hasattr(model, "_init_weights"):
            raise ValueError("overcoat.stream: only a transformers model can be filled from the meta device")
        self.names = {id(tensor): name for name, tensor in _tensors(model)}
        is_folder = weights is not None and weights != RANDOM
        self.checkpoint = Checkpoint(str(weights), self.names.values()) if is_folder else None

    @torch.no_grad()
    def fill_stack(self, stack: Any) -> None:
        """Fill the weights of a stack in host memory from the checkpoint."""
        if self.checkpoint is not None:
            for param in stack.params:
                self.checkpoint.read(self.names[id(param)], param)

    @torch.no_grad()
    def draw(self, device: torch.device, streamed: Iterable[int]) -> None:
        """Draw random weights on a device by the model's own initialization, one layer after the other, so that they
        do not depend on what is streamed: that is copied to its place in host memory. streamed: ids of parameters."""
        if not self.is_meta or self.checkpoint is not None:
            return
        waiting = set(streamed)

        def make(module: nn.Module) -> None:
            # A layer as a whole: GPT-2's attention draws a weight of a module in it again.
            is_layer = isinstance(module, Fp8DecoderLayer)
            for child in () if is_layer else module.children():
                make(child)
            parts = list(module.modules()) if is_layer else [module]
            made = [tensor for part in parts for tensor in _make_missing(part, device)]
            owned = [each for part in parts for each in part._parameters.values() if id(each) in waiting]
            places = [(param, param.data) for param in dict.fromkeys(owned) if param is not None]
            for param, host in places:
                waiting.remove(id(param))
                param.data = torch.empty_like(host, device=device)
            if made or places:
                module.apply(self.model._init_weights) if is_layer else self.model._init_weights(module)
            for param, host in places:
                host.copy_(param.data)
                param.data = host

        make(self.model)

    @torch.no_grad()
    def fill_rest(self, device: torch.device) -> None:
        """Make all that is still on the meta device and fill it from the checkpoint; streamed weights are hidden."""
        if self.checkpoint is None:
            return
        for module in self.model.modules():
            made = _make_missing(module, device)
            if any(not isinstance(tensor, nn.Parameter) for _, tensor in made):
                self.model._init_weights(module)
            for tensor_id, tensor in made:
                if tensor_id in self.names:
                    self.checkpoint.read(self.names[tensor_id], tensor)


def _make_missing(module: nn.Module, device: torch.device) -> list[tuple[int, Tensor]]:
    """Make a module's own tensors that are on the meta device; return them, with the id of what they were."""
    made: list[tuple[int, Tensor]] = []
    for param in module._parameters.values():
        if param is not None and param.is_meta:
            set_data(param, rewrap(param, torch.empty(local(param).shape, dtype=param.dtype, device=device)))
            made.append((id(param), param))
    for name, each in module._buffers.items():
        if each is not None and each.is_meta:
            own = module._buffers[name] = torch.empty(each.shape, dtype=each.dtype, device=device)
            made.append((id(each), own))
    return made


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, tied ones under their first name."""
    yield from model.named_parameters()
    kept = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)
