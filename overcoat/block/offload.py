"""Activation offloading: a block's saved tensors move to host memory after its forward, and back for its backward.

    current stream    [block 0 fwd] [block 1 fwd] [block 2 fwd] ...  [block 2 bwd] [block 1 bwd] [block 0 bwd]
    to host                         [of block 0 ...........]
    to device                                                        [of block 0 ...........]

A copy may overlap `Offload.ahead` blocks each way: two if all blocks are offloaded, four if every second one is. After
the forward of the block that far ahead the current stream waits for the copy and the device memory is freed; before
that block's backward the copy back begins. So about two blocks' tensors are in transit, and memory is freed at a fixed
place in the stream's order. `Tensor.record_stream` would free it at a time that depends on how far the host runs ahead.

Only the block's own tensors are moved: no parameters, no tables or masks that all blocks share, nothing below
`LEAST_BYTES`. Hooks on the saved tensors (`SavedTensor.register_hooks`) keep the host buffer alive as long as autograd
may read it; then it returns to a pool. So a second backward, several forwards before one, and dropped graphs need no
special case. Events order the streams; the host waits only while the pool grows (in the first step).

On a CPU the same code copies from memory to memory, and on the meta device it only counts.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Optional, TypeGuard

import torch
from torch import Tensor

from overcoat.memory import without_hooks
from overcoat.pinned_memory import Buffer, Pool, host_buffer, packed

# Offloaded blocks in transit, and the most blocks, offloaded or not, that a copy may overlap. At 4 x 2048 tokens on an
# H200 a block of Llama-2-7B takes 4 ms forward and 8 ms backward, the copy of its saved tensors 10 ms (PCIe 5.0).
AHEAD, MOST_AHEAD = 2, 4
# Smaller tensors stay on the device.
LEAST_BYTES = 64 * 2**10
KEEPS_NONE = (
    "this layer was chosen to save its tensors in host memory (Recipe.offload_blocks), but saves none: nothing in or "
    "before it is trained. Call overcoat.convert(model, recipe) again, which chooses among layers that save tensors; "
    "run a model that is frozen as a whole under torch.no_grad()"
)


class Offload(NamedTuple):
    """places: indices of the blocks whose saved tensors are offloaded. ahead: blocks that a copy may overlap."""

    places: set[int]
    ahead: int


def choose_blocks(count: int | Literal["all"], blocks: int, tower: int = 0) -> Offload:
    """Choose which `count` of `blocks` blocks save their tensors in host memory.

    They are spread evenly, so that copies also overlap the blocks between. The last ones are left out: their tensors
    would come back before they have left. The first `tower` blocks are a vision tower's; these are chosen only if the
    others are too few: they save little, and finish before a large copy does.
    """
    others, able = blocks - tower, max(blocks - AHEAD, 0)
    needs_grad = able if count == "all" else min(count, able)
    large = min(needs_grad, max(others - AHEAD, 0))
    ahead = max(min(AHEAD * others // max(large, 1), others - large, MOST_AHEAD), AHEAD)
    chosen = {tower + place for place in _spread(large, others - ahead)}
    return Offload(_spread(needs_grad - large, min(tower, able)) | chosen, ahead)


def _spread(needs_grad: int, able: int) -> set[int]:
    """Return `needs_grad` of the places 0 to able - 1, spread evenly."""
    return {place for place in range(able) if -(-(place + 1) * needs_grad // able) > -(-place * needs_grad // able)}


class _Offloaded:
    """Tensors of one block in host memory, alive as long as autograd may read them."""

    def __init__(self, transfers: Transfers, tensors: list[Tensor], buffer: Buffer, ahead: int) -> None:
        self.transfers, self.buffer, self.ahead = transfers, buffer, ahead
        self.on_device: Optional[list[Tensor]] = tensors
        self.kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self.sent: Any = None  # CUDA events: after the copy to the host, and after the one back
        self.arrived: Any = None
        self.reader: Any = None  # the stream that the device's memory was taken for
        self._send(tensors)

    def host(self) -> list[Tensor]:
        """Return the buffer as one uint8 tensor per saved tensor; [] on the meta device."""
        memory = self.buffer.memory
        if memory is None:
            return []
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in self.kinds]
        offsets, _ = packed(sizes)
        return [memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]

    def _send(self, tensors: list[Tensor]) -> None:
        with self.transfers.copying("to_host", self.buffer.last_read) as done:
            for host, tensor in zip(self.host(), tensors, strict=False):
                host.copy_(_bytes(tensor), non_blocking=True)
            self.sent = done()

    def leave(self) -> None:
        """Free the device memory once the copy to the host has ended."""
        if self.on_device is not None and self.arrived is None:
            self.transfers.wait_for(self.sent)
            self.on_device = None

    def fetch(self) -> None:
        """Begin to copy the tensors back, unless they are on the device."""
        if self.on_device is not None:
            return
        device = self.transfers.device
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.kinds]
        for tensor in tensors:
            self.transfers.on_fetch(tensor)
        with self.transfers.copying("to_device", self.sent) as done:
            for host, tensor in zip(self.host(), tensors, strict=False):
                _bytes(tensor).copy_(host, non_blocking=True)
            self.arrived = self.buffer.last_read = done()
        self.reader = self.transfers.current()
        self.on_device = tensors

    def tensor(self, place: int) -> Tensor:
        """Return one of the tensors, on the device."""
        self.fetch()
        self.transfers.wait_for(self.arrived)
        assert self.on_device is not None
        return self.on_device[place]

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if self.arrived is not None:
            self.reader.wait_event(self.arrived)  # the next owner of the device memory may write at once
        self.transfers.pool.free.append(self.buffer)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class Transfers:
    """State that all blocks of one device share: streams, host buffers, the blocks that ran last.

    on_fetch: called with every tensor that is allocated for a copy back, for memory accounting.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = Pool(self._make)
        self.recent: deque[Optional[weakref.ref[_Offloaded]]] = deque([None] * MOST_AHEAD, MOST_AHEAD)
        self.on_fetch: Callable[[Tensor], None] = lambda _: None
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            self.streams = {name: torch.cuda.Stream(device) for name in ("to_host", "to_device")}

    def _make(self, size: int) -> Optional[Tensor]:
        if self.device.type == "meta":
            return None
        return host_buffer(size, self.is_cuda, "saved activations", "a smaller Recipe.offload_blocks")

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device) if self.is_cuda else None

    def wait_for(self, event: Any) -> None:
        """Make the current stream wait for an event, if any."""
        if event is not None:
            self.current().wait_event(event)

    @contextlib.contextmanager
    def copying(self, direction: str, after: Any) -> Iterator[Callable[[], Any]]:
        """Run copies on the stream of `direction`, after the current stream and the event `after`.

        Yields a function that records an event on it. Waiting for `after` matters only if blocks run on several
        streams; otherwise the current stream has waited for it.
        """
        if not self.is_cuda:
            yield lambda: None
            return
        stream = self.streams[direction]
        stream.wait_stream(self.current())
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield stream.record_event

    def store(self, tensors: list[Tensor], ahead: int) -> _Offloaded:
        """Begin to copy a block's tensors to the host."""
        _, size = packed([tensor.nbytes for tensor in tensors])
        return _Offloaded(self, tensors, self.pool.take(size), ahead)

    def follow(self, y: Tensor, offloaded: Optional[_Offloaded]) -> None:
        """Called when a block has returned y: end the copy of the block `ahead` before it, now and in the backward.

        That block's device memory is freed, and a hook on y begins its copy back. offloaded: this block's own tensors.
        """
        for age, before in enumerate(reversed(self.recent), start=1):
            earlier = None if before is None else before()
            if earlier is not None and before is not None and earlier.ahead == age:
                earlier.leave()
                y.register_hook(functools.partial(_fetch, before))
        self.recent.append(None if offloaded is None else weakref.ref(offloaded))


def _fetch(of: weakref.ref[_Offloaded], _gradient: Tensor) -> None:
    offloaded = of()
    if offloaded is not None:
        offloaded.fetch()


_transfers: dict[torch.device, Transfers] = {}


def transfers(device: torch.device) -> Transfers:
    """Return the `Transfers` of a device."""
    if device not in _transfers:
        _transfers[device] = Transfers(device)
    return _transfers[device]


@contextlib.contextmanager
def separate(device: torch.device) -> Iterator[Transfers]:
    """Give a device new `Transfers` inside the context, so that the needs of one model can be counted."""
    before = _transfers.pop(device, None)
    try:
        yield transfers(device)
    finally:
        del _transfers[device]
        if before is not None:
            _transfers[device] = before


def offload_active(ahead: Optional[int], x: Tensor) -> TypeGuard[int]:
    """True if a layer with input x takes part in offloading; ahead: `Fp8DecoderLayer.overcoat_offload`."""
    # Neither torch.compile nor CUDA graph capture can record the copies.
    is_recorded = torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    return ahead is not None and not is_recorded


def run_offloaded(block: Callable[[], Tensor], num_inputs: int, ahead: int) -> Tensor:
    """Run a block of a model in which some blocks are offloaded, and return its result.

    Args:
        block: returns the result of one autograd node.
        num_inputs: how many of the node's saved tensors, the first ones, are its inputs; they are not moved.
        ahead: blocks that the copy to the host may overlap; 0: this block is not offloaded.
    """
    offloaded = None
    with without_hooks() as note:
        y = block()
        if y.grad_fn is None and ahead and torch.is_grad_enabled():
            warnings.warn(KEEPS_NONE, stacklevel=2)
        if note is not None and y.grad_fn is not None:
            node: Any = y.grad_fn
            tensors, saved = node.saved_tensors, node._raw_saved_tensors
            moved = [place for place, x in enumerate(tensors) if ahead and place >= num_inputs and _is_worth_it(x)]
            for place, x in enumerate(tensors):
                if x is not None:
                    note(x, place in moved)
            if moved:
                offloaded = transfers(y.device).store([tensors[place] for place in moved], ahead)
                for index, place in enumerate(moved):
                    saved[place].register_hooks(lambda _, index=index: index, offloaded.tensor)
            del tensors
    advance_offload(y, offloaded)
    return y


def advance_offload(y: Any, offloaded: Optional[_Offloaded] = None) -> None:
    """Call `Transfers.follow` after any layer, in FP8 or not, whose result y requires a gradient."""
    if isinstance(y, Tensor) and y.requires_grad:
        transfers(y.device).follow(y, offloaded)


def _is_worth_it(x: Optional[Tensor]) -> bool:
    """True if moving a saved tensor frees its memory, and enough of it."""
    return x is not None and x.nbytes >= LEAST_BYTES and x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
