"""Weights of streamed layers: where they lie in host memory, and what stands for them on the device.

    Stack        the weights of one FP8 operand (q, k, v; gate, up) and their E4M3 codes, in one page-locked buffer
    PlainStack   large weights of a module that is no part of the FP8 block (experts): they are sent in 16 bits
    Layer        the stacks of one decoder layer, which are sent to one slot

A layer's slot never changes, so neither do the addresses of what is sent: the stand-ins for the weights
(`GatheredWeight` in block/linear.py, or plain tensors) are made once, and autograd may save them for the backward.
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
from overcoat.optim.sharding import local, rewrap
from overcoat.pinned_memory import alias, host_buffer, packed
from overcoat.streaming.load import set_data

INSTEAD = "a smaller model, or a host with more memory"
# Bytes of one copy: others of the same direction run in between, and none waits for a whole stack.
PIECE = 64 * 2**20


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy uint8 (n,) between host and device."""
    for to, of in zip(target.split(PIECE), source.split(PIECE), strict=True):
        to.copy_(of, non_blocking=True)


class Shapes:
    """Shapes of weights, and their places in memory that holds all of them."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.shapes = [(weight.shape, weight.dtype, weight.nbytes) for weight in weights]
        self.offsets, self.bytes = packed([size for *_, size in self.shapes])
        self.sizes = [weight.numel() for weight in weights]

    def weights_in(self, memory: Tensor) -> list[Tensor]:
        """Return uint8 (bytes,) as the weights."""
        parts = zip(self.shapes, self.offsets, strict=True)
        return [memory[start : start + size].view(dtype).view(shape) for (shape, dtype, size), start in parts]

    def codes_in(self, memory: Tensor) -> list[Tensor]:
        """Return uint8 (sum of `sizes`,) as the codes of each weight, E4M3 in its shape."""
        parts = zip(self.shapes, memory.split(self.sizes), strict=True)
        return [codes.view(E4M3.dtype).view(shape) for (shape, *_), codes in parts]

    def sums_in(self, memory: Tensor) -> list[Tensor]:
        """Return FP32 (sum of `sizes`,) as sums of each weight's gradients."""
        parts = zip(self.shapes, memory.split(self.sizes), strict=True)
        return [of.view(shape) for (shape, *_), of in parts]


class Stack:
    """Weights that are quantized to one FP8 operand.

    Args:
        modules: their linear layers, of peft's the base. names: of the weights. scaling: `Recipe.linear_scaling`.

    Attributes:
        own: shapes of the weights, of this process' rows if they are sharded (sharded.py). whole: of all rows.
        attributes: the weights' names in their modules. host: the weights, uint8 (bytes,); sent: what is sent to the
            slot for each forward and backward: their codes, uint8 (code_bytes,).
        leaves: what stands for each weight while its layer trains; autograd accumulates gradients there.
        entries: of gradients that wait for the stack's step: number of the parameter group, index in the optimizer,
            parameter, gradient. awaited: how many a backward makes.
        written: CUDA event after the last copy of weights and codes to the host.
    """

    attributes: Sequence[str]

    def __init__(self, modules: Sequence[nn.Module], names: Sequence[str], scaling: str) -> None:
        self.modules: list[Any] = [base_of(module) for module in modules]
        self.adapted, self.names, self.scaling = modules, names, scaling
        self.attributes = [name.rpartition(".")[2] for name in names]
        of_modules = zip(self.modules, self.attributes, strict=True)
        self.params: list[nn.Parameter] = [getattr(module, name) for module, name in of_modules]
        self.own = self.whole = Shapes([local(param) for param in self.params])
        self.bytes, self.sizes = self.own.bytes, self.own.sizes
        self.leaves: list[Tensor] = []
        self.entries: list[tuple[int, int, Tensor, Tensor]] = []
        self.awaited, self.place = 0, 0
        self.written: Any = None
        self.seen: Any = None  # versions of the weights that the codes were made of
        self.sums: Optional[Tensor] = None  # of gradients, FP32 (sum of `sizes`,), in host memory; once accumulated
        self.has_sums = False
        self.summed: set[int] = set()  # ids of the weights that have sums

    @property
    def code_bytes(self) -> int:
        """Return the bytes of codes that a step makes."""
        return sum(self.sizes)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that a forward or backward reads in the slot."""
        return sum(self.whole.sizes)

    def move_to_host(self, page_locked: bool) -> None:
        """Move the weights to one buffer of host memory, each in its turn; the `Parameter`s stay the same."""
        size = self.bytes + self.code_bytes
        buffer = host_buffer(size, page_locked, f"the weights of {self.names[0]}", INSTEAD)
        self.host = buffer[: self.bytes]
        self.sent = buffer[self.bytes :] if self.code_bytes else self.host
        for param, own in zip(self.params, self.own.weights_in(self.host), strict=True):
            if not param.is_meta:
                own.copy_(local(param.detach()))
            set_data(param, rewrap(param, alias(own)))
        self.addresses = [local(param).data_ptr() for param in self.params]

    def send(self, target: Tensor, wide: bool) -> None:
        """Copy the codes, or if `wide` the weights, to their part of a slot."""
        copy_bytes(target, self.host if wide else self.sent)

    def reduced(self, entries: list[Any]) -> list[Any]:
        """Return gradients of all rows as those that are stepped."""
        return entries

    def allocate_sums(self, page_locked: bool) -> None:
        """Allocate host memory for sums of gradients, unless there is."""
        if self.sums is None:
            size = 4 * sum(self.sizes)
            buffer = host_buffer(size, page_locked, f"gradients of {self.names[0]}", "no accumulation: larger batches")
            self.sums = buffer.view(torch.float32)

    def place_of(self, param: Tensor) -> int:
        """Return a weight's place in the stack."""
        return next(place for place, own in enumerate(self.params) if own is param)

    def stand_in(self, sent: Tensor) -> None:
        """Make the leaves, on the device memory where `sent` will be, uint8 (sent_bytes,)."""
        for param, held in zip(self.params, self.whole.codes_in(sent), strict=True):
            self.leaves.append(nn.Parameter(GatheredWeight(held, None, None, param.dtype), param.requires_grad))

    def encode(self, weights: list[Tensor]) -> Optional[Tensor]:
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
        self.set_scales(scales, amax)
        return data.view(torch.uint8).view(-1)

    def set_scales(self, scales: list[Any], amax: Optional[Tensor]) -> None:
        """Give the leaves the scales, and the maximum, of new codes."""
        leaves: list[Any] = self.leaves
        for leaf, own in zip(leaves, scales, strict=True):
            leaf.scale, leaf.w_amax = own, amax

    def versions(self) -> Any:
        """Return version counters of the weights, and the adapters that peft has merged into them, untracked."""
        merged = [getattr(module, "merged_adapters", ()) for module in self.adapted]
        return [param._version for param in self.params], [list(of) for of in merged]

    def check(self) -> None:
        """Raise ValueError if a weight was replaced or moved since."""
        for place, (module, param) in enumerate(zip(self.modules, self.params, strict=True)):
            is_there = module._parameters.get(self.attributes[place]) is param
            if not is_there or getattr(param, "_local_tensor", param).data_ptr() != self.addresses[place]:
                raise ValueError(
                    f"{self.names[place]} was moved or replaced since overcoat.stream, which keeps it in host memory: "
                    "call remove() of its handle before model.to(...) and load_state_dict(assign=True), and "
                    "overcoat.stream after"
                )


class PlainStack(Stack):
    """Large weights of one module that are used in 16 bits."""

    code_bytes = 0

    @property
    def sent_bytes(self) -> int:
        return self.whole.bytes

    def stand_in(self, sent: Tensor) -> None:
        # `data`: with a version counter of its own, since autograd saves the leaf, and copies write to `sent`.
        for param, own in zip(self.params, self.whole.weights_in(sent), strict=True):
            self.leaves.append(nn.Parameter(own.data, param.requires_grad))

    def encode(self, weights: list[Tensor]) -> Optional[Tensor]:
        """Return None: the weights themselves are sent."""
        return None


class Layer:
    """A streamed decoder layer. number: its place among all; module: the layer itself.

    arrived: CUDA event after the last copy to its slot. is_wide: True if the modules read all weights in 16 bits, or
    did last. changes: how often a stack's weights have been stepped, or encoded since they were written to.
    """

    is_wide, changes = False, 0

    def __init__(self, number: int, name: str, module: nn.Module, stacks: list[Stack]) -> None:
        self.number, self.name, self.module, self.stacks = number, name, module, stacks
        self.offsets, self.bytes = packed([stack.sent_bytes for stack in stacks])
        self.wide_offsets, self.wide_bytes = packed([stack.whole.bytes for stack in stacks])
        self.arrived: Any = None

    def sent_in(self, memory: Tensor) -> list[Tensor]:
        """Return the parts of uint8 (bytes,) that hold what each stack sends."""
        parts = zip(self.stacks, self.offsets, strict=True)
        return [memory[start : start + stack.sent_bytes] for stack, start in parts]

    def wide_of(self, memory: Tensor) -> list[Tensor]:
        """Return the parts of uint8 (wide_bytes,) that hold each stack's weights."""
        parts = zip(self.stacks, self.wide_offsets, strict=True)
        return [memory[start : start + stack.whole.bytes] for stack, start in parts]

    def weights_in(self, memory: Tensor) -> list[Tensor]:
        """Return uint8 (wide_bytes,) as all weights."""
        parts = zip(self.stacks, self.wide_of(memory), strict=True)
        return [weight for stack, part in parts for weight in stack.whole.weights_in(part)]

    def put(self, weights: Sequence[Optional[Tensor]]) -> None:
        """Make the modules read these tensors instead of their parameters."""
        places = [of for stack in self.stacks for of in zip(stack.modules, stack.attributes, strict=True)]
        for (module, name), weight in zip(places, weights, strict=True):
            module._parameters[name] = weight

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for stack in self.stacks for param in stack.params]

    def leaves(self) -> list[Tensor]:
        """Return the stand-ins of all weights, which follow a change of `requires_grad`."""
        for stack in self.stacks:
            for leaf, param, name in zip(stack.leaves, stack.params, stack.names, strict=True):
                if leaf.requires_grad != param.requires_grad:
                    leaf.requires_grad_(param.requires_grad)
                if param.requires_grad and not leaf._post_accumulate_grad_hooks:
                    raise ValueError(f"{name} is trained since overcoat.stream, which was told that it is frozen")
                if param.requires_grad and (param._backward_hooks or param._post_accumulate_grad_hooks):
                    raise ValueError(
                        f"{name} has a hook for its gradient, which overcoat.stream would not run: remove the hook, or "
                        "use overcoat.release_gradients instead"
                    )
        return [leaf for stack in self.stacks for leaf in stack.leaves]
