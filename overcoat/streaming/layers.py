"""Weights of streamed layers: where they lie in host memory, and what stands for them on the device.

    Stack    the weights of one FP8 operand (q, k, v; gate, up; ...), in one page-locked buffer
    Layer    the stacks of one decoder layer; all their E4M3 codes are in one buffer, which one copy sends to a slot

A layer's slot never changes, so neither do the addresses of its codes on the device: the stand-ins for the weights
(`GatheredWeight`, block/linear.py) are made once, and autograd may save them for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from overcoat.block.linear import GatheredWeight
from overcoat.formats import E4M3
from overcoat.kernels.blockwise import BLOCK
from overcoat.kernels.weights import block_stack_weights, numbers_of, quantize_operands
from overcoat.models.lora import base_of
from overcoat.pinned_memory import alias, host_buffer, packed
from overcoat.streaming.load import set_data

INSTEAD = "a smaller model, or a host with more memory"


class Stack:
    """Weights that are quantized to one FP8 operand.

    Args:
        modules: their linear layers, of peft's the base. names: of the weights. scaling: `Recipe.linear_scaling`.

    Attributes:
        leaves: what stands for each weight while its layer trains; autograd accumulates gradients there.
        entries: of gradients that wait for the stack's step: number of the parameter group, index in the optimizer,
            parameter, gradient. awaited: how many a backward makes.
        written: CUDA event after the last copy of weights and codes to the host.
    """

    def __init__(self, modules: Sequence[nn.Module], names: Sequence[str], scaling: str) -> None:
        self.modules: list[Any] = [base_of(module) for module in modules]
        self.adapted, self.names, self.scaling = modules, names, scaling
        self.params: list[nn.Parameter] = [module.weight for module in self.modules]
        self.offsets, self.bytes = packed([param.nbytes for param in self.params])
        self.sizes = [param.numel() for param in self.params]
        self.leaves: list[GatheredWeight] = []
        self.entries: list[tuple[int, int, Tensor, Tensor]] = []
        self.awaited, self.place = 0, 0
        self.written: Any = None
        self.seen: Any = None  # versions of the weights that the codes were made of

    @property
    def code_bytes(self) -> int:
        return sum(self.sizes)

    def move_to_host(self, page_locked: bool) -> None:
        """Move the weights to one buffer of host memory, each in its turn; the `Parameter`s stay the same."""
        self.host = host_buffer(self.bytes, page_locked, f"the weights of {self.names[0]}", INSTEAD)
        for param, own in zip(self.params, self.weights_in(self.host), strict=True):
            if not param.is_meta:
                own.copy_(param.detach())
            set_data(param, alias(own))
        self.addresses = [param.data_ptr() for param in self.params]

    def weights_in(self, memory: Tensor) -> list[Tensor]:
        """Return uint8 (bytes,) as the weights."""
        parts = zip(self.params, self.offsets, strict=True)
        return [memory[start : start + param.nbytes].view(param.dtype).view(param.shape) for param, start in parts]

    def place_of(self, param: Tensor) -> int:
        """Return a weight's place in the stack."""
        return next(place for place, own in enumerate(self.params) if own is param)

    def codes_in(self, memory: Tensor) -> list[Tensor]:
        """Return uint8 (code_bytes,) as the codes of each weight, E4M3 in its shape."""
        parts = zip(self.params, memory.split(self.sizes), strict=True)
        return [codes.view(E4M3.dtype).view(param.shape) for param, codes in parts]

    def stand_in(self, codes: Tensor) -> None:
        """Make the leaves, on the device memory where the codes will be, uint8 (code_bytes,)."""
        for param, held in zip(self.params, self.codes_in(codes), strict=True):
            leaf = GatheredWeight(held, None, None, param.dtype)
            self.leaves.append(leaf.requires_grad_(param.requires_grad))  # type: ignore[arg-type]

    def encode(self, weights: list[Tensor]) -> Tensor:
        """Return the codes, uint8 (code_bytes,), of the weights on the device, and give the leaves their scales.

        Scales are in new memory: a pending backward has saved the old maximum.
        """
        scales: list[Any]
        if self.scaling == "tensor":
            data, numbers, tops = quantize_operands(weights, [len(weights)], [])
            (scale,), (amax,) = numbers_of(numbers), numbers_of(tops)
            scales = [scale] * len(weights)
        else:
            data, scale = block_stack_weights(weights, False)
            scales, amax = list(scale.split([len(weight) // BLOCK for weight in weights])), None
        for leaf, own in zip(self.leaves, scales, strict=True):
            leaf.scale, leaf.w_amax = own, amax
        return data.view(torch.uint8).view(-1)

    def versions(self) -> Any:
        """Return version counters of the weights, and the adapters that peft has merged into them, untracked."""
        merged = [getattr(module, "merged_adapters", ()) for module in self.adapted]
        return [param._version for param in self.params], [list(of) for of in merged]

    def check(self) -> None:
        """Raise ValueError if a weight was replaced or moved since."""
        for module, param, address, name in zip(self.modules, self.params, self.addresses, self.names, strict=True):
            if module._parameters.get("weight") is not param or param.data_ptr() != address:
                raise ValueError(
                    f"{name} was moved or replaced since overcoat.stream, which keeps it in host memory: call remove() "
                    "of its handle before model.to(...) and load_state_dict(assign=True), and overcoat.stream after"
                )


class Layer:
    """A streamed decoder layer. number: its place among all; module: the layer itself.

    arrived: CUDA event after the last copy to its slot.
    """

    def __init__(self, number: int, name: str, module: nn.Module, stacks: list[Stack]) -> None:
        self.number, self.name, self.module, self.stacks = number, name, module, stacks
        self.offsets, self.bytes = packed([stack.code_bytes for stack in stacks])
        self.wide_offsets, self.wide_bytes = packed([stack.bytes for stack in stacks])
        self.arrived: Any = None

    def allocate_codes(self, page_locked: bool) -> None:
        """Allocate host memory for the codes."""
        self.codes = host_buffer(self.bytes, page_locked, f"the codes of {self.name}", INSTEAD)

    def codes_of(self, memory: Tensor) -> list[Tensor]:
        """Return the parts of uint8 (bytes,) that hold each stack's codes."""
        parts = zip(self.stacks, self.offsets, strict=True)
        return [memory[start : start + stack.code_bytes] for stack, start in parts]

    def wide_of(self, memory: Tensor) -> list[Tensor]:
        """Return the parts of uint8 (wide_bytes,) that hold each stack's weights."""
        parts = zip(self.stacks, self.wide_offsets, strict=True)
        return [memory[start : start + stack.bytes] for stack, start in parts]

    def weights_in(self, memory: Tensor) -> list[Tensor]:
        """Return uint8 (wide_bytes,) as all weights."""
        parts = zip(self.stacks, self.wide_of(memory), strict=True)
        return [weight for stack, part in parts for weight in stack.weights_in(part)]

    def is_put_in_fp8(self) -> bool:
        """True if the modules read FP8 codes now."""
        return isinstance(self.stacks[0].modules[0]._parameters["weight"], GatheredWeight)

    def hide(self, hidden: bool) -> None:
        """Hide the weights from `model.to`, or show them again."""
        for stack in self.stacks:
            for module, param in zip(stack.modules, stack.params, strict=True):
                module._parameters["weight"] = None if hidden else param

    def put(self, weights: Optional[list[Tensor]]) -> None:
        """Make the modules read these tensors instead of their parameters; None: their parameters."""
        modules = [module for stack in self.stacks for module in stack.modules]
        own = [param for stack in self.stacks for param in stack.params]
        for module, weight in zip(modules, weights or own, strict=True):
            module._parameters["weight"] = weight

    def leaves(self) -> list[Tensor]:
        """Return the stand-ins of all weights, which follow a change of `requires_grad`."""
        for stack in self.stacks:
            for leaf, param, name in zip(stack.leaves, stack.params, stack.names, strict=True):
                if leaf.requires_grad != param.requires_grad:
                    leaf.requires_grad_(param.requires_grad)
                if param.requires_grad and not leaf._post_accumulate_grad_hooks:
                    raise ValueError(f"{name} is trained since overcoat.stream, which was told that it is frozen")
        return [leaf for stack in self.stacks for leaf in stack.leaves]
