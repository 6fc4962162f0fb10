"""Memory of `overcoat.stream`, from the shapes of the streamed layers (streaming/stream.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch

from overcoat.estimate.meter import META
from overcoat.estimate.phases import EMBEDDING_BACKWARD
from overcoat.estimate.workspaces import aligned
from overcoat.kernels.blockwise import BLOCK
from overcoat.optim.release import Parts
from overcoat.pinned_memory import packed
from overcoat.streaming.layers import Layer, Stack
from overcoat.streaming.stream import BACKLOG, BUFFERS, SLOTS


def _stacks(layers: Sequence[Layer]) -> list[Stack]:
    return [stack for layer in layers for stack in layer.stacks]


def stand_in(layers: Sequence[Layer], parts: Parts) -> None:
    """Put what stands for the weights of streamed layers in their place, on the meta device: codes in slots, of which
    the GEMMs make no others. Their gradients belong to the weights' parts."""
    size = max([layer.bytes for layer in layers], default=0)
    slots = [torch.empty(size, dtype=torch.uint8, device=META) for _ in range(SLOTS)]
    for layer in layers:
        for stack, sent in zip(layer.stacks, layer.sent_in(slots[layer.number % SLOTS]), strict=True):
            stack.stand_in(sent)
            with torch.no_grad():
                stack.encode(list(stack.params))  # for the scales
            for param, leaf in zip(stack.params, stack.leaves, strict=True):
                if param.requires_grad:
                    parts.number[id(leaf)] = parts.number.pop(id(param))
        layer.put([leaf for stack in layer.stacks for leaf in stack.leaves])


def weights_of(layers: Sequence[Layer]) -> frozenset[int]:
    """Return the ids of the streamed weights."""
    return frozenset(id(param) for stack in _stacks(layers) for param in stack.params)


def code_bytes(layers: Sequence[Layer]) -> int:
    """Return the bytes that come for a forward: codes, and weights in 16 bits."""
    return sum(layer.bytes for layer in layers)


def check_shares(layers: Sequence[Layer], gpus: int) -> None:
    """Raise ValueError if a weight's rows, or its blocks, cannot be shared evenly: `overcoat.stream` leaves such
    weights to FSDP2, which is not estimated."""
    for stack in _stacks(layers):
        for param, name in zip(stack.params, stack.names, strict=True):
            unit = gpus * (BLOCK if stack.scaling == "block" else 1)
            if len(param) % unit:
                raise ValueError(f"stream: {gpus} GPUs cannot share the {len(param)} rows of {name} evenly: use others")


def _own_bytes(stack: Stack, gpus: int) -> int:
    """Return the bytes of one GPU's rows of a stack."""
    return packed([size // gpus for *_, size in stack.own.shapes])[1]


def stream_host_bytes(layers: Sequence[Layer], gpus: int = 1) -> int:
    """Return the bytes of one GPU's weights and codes in host memory; states come on top."""
    return sum(_own_bytes(stack, gpus) + stack.code_bytes // gpus for stack in _stacks(layers))


def stream_buffers(layers: Sequence[Layer], gpus: int = 1, reduced: Optional[torch.dtype] = None) -> int:
    """Return the bytes on the GPU that all layers share: slots of codes, buffers of own weights and their new codes.

    Of several GPUs also own gradients of a stack, and one weight's in the dtype `reduced`, None: its own.
    """
    stacks = _stacks(layers)
    largest = aligned(max([_own_bytes(of, gpus) for of in stacks], default=0))
    codes = [aligned(of.code_bytes // gpus) for of in stacks]  # of as many as are stepped in a row, one in each buffer
    slots = SLOTS * aligned(max([layer.bytes for layer in layers], default=0))
    summed = largest if gpus > 1 else 0
    params = [param for stack in stacks for param in stack.params]
    if gpus > 1 and reduced is not None:
        summed += max(
            [aligned(param.numel() * reduced.itemsize) for param in params if param.dtype != reduced], default=0
        )
    in_a_row = max([sum(codes[first : first + BUFFERS]) for first in range(len(codes))], default=0)
    return slots + BUFFERS * largest + in_a_row + summed


def waiting_gradients(layers: Sequence[Layer], label: str) -> int:
    """Return the most bytes of gradients that wait for their step in a phase, besides those of its own block."""
    of_layers = [
        sum(param.nbytes for stack in layer.stacks for param in stack.params if param.requires_grad) for layer in layers
    ]
    if label == EMBEDDING_BACKWARD:
        return sum(of_layers[: BACKLOG + 1])
    is_block = label.startswith("block") and label.endswith("backward")
    return BACKLOG * max(of_layers, default=0) if is_block and label != f"block {len(layers)} backward" else 0
