"""Memory of `overcoat.stream`, from the shapes of the streamed layers (streaming/stream.py)."""

from __future__ import annotations

from collections.abc import Sequence

from overcoat.estimate.phases import EMBEDDING_BACKWARD
from overcoat.estimate.workspaces import aligned
from overcoat.streaming.layers import Layer, Stack
from overcoat.streaming.stream import BACKLOG, BUFFERS, SLOTS


def _stacks(layers: Sequence[Layer]) -> list[Stack]:
    return [stack for layer in layers for stack in layer.stacks]


def weights_of(layers: Sequence[Layer]) -> frozenset[int]:
    """Return the ids of the streamed weights."""
    return frozenset(id(param) for stack in _stacks(layers) for param in stack.params)


def code_bytes(layers: Sequence[Layer]) -> int:
    """Return the bytes that come for a forward: codes, and weights in 16 bits."""
    return sum(layer.bytes for layer in layers)


def stream_host_bytes(layers: Sequence[Layer]) -> int:
    """Return the bytes of weights and codes in host memory; states come on top."""
    return sum(stack.bytes + stack.code_bytes for stack in _stacks(layers))


def stream_buffers(layers: Sequence[Layer]) -> int:
    """Return the bytes on the GPU that all layers share: slots of codes, buffers of weights and their new codes."""
    stacks = _stacks(layers)
    largest = [of.bytes for of in stacks], [of.code_bytes for of in stacks]
    slots = SLOTS * aligned(max([layer.bytes for layer in layers], default=0))
    return slots + BUFFERS * sum(aligned(max(sizes, default=0)) for sizes in largest)


def waiting_gradients(layers: Sequence[Layer], label: str) -> int:
    """Return the most bytes of gradients that wait for their step in a phase, besides those of its own block."""
    of_layers = [
        sum(param.nbytes for stack in layer.stacks for param in stack.params if param.requires_grad) for layer in layers
    ]
    if label == EMBEDDING_BACKWARD:
        return sum(of_layers[: BACKLOG + 1])
    is_block = label.startswith("block") and label.endswith("backward")
    return BACKLOG * max(of_layers, default=0) if is_block and label != f"block {len(layers)} backward" else 0
