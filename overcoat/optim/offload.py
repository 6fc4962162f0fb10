"""Offload: moments and remainders live in host memory and pass through the GPU in chunks while it steps.

    host memory     page-locked, all states of a parameter in one buffer; step counts stay on the GPU
    GPU             SLOTS staging buffers; parameters and gradients as ever

    copy-in stream    [chunk 0][chunk 1][chunk 2]          [chunk 3] ...
    current stream             [step 0] [step 1] [step 2]           ...
    copy-out stream                     [chunk 0][chunk 1][chunk 2] ...

A chunk is what fits into one staging buffer: whole parameters, or pieces of a large one: some rows of a matrix, some
groups of a vector. A group is never cut and random numbers count groups in the whole parameter, so every bit is that
of the step without offload. Events order the three streams; the host waits for nothing. Time: the states cross PCIe
once each way per step, both ways at once; 3.05 bytes per parameter with "8bit" and "bf16+8".

The last chunks are still on their way to host memory when `step` returns: read a state through `state_dict()`, which
waits and copies, or after `torch.cuda.synchronize()`.

On a CPU the same code runs with plain memory on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.host import ALIGNMENT, packed
from overcoat.kernels.adamw import Hyper, rows_of
from overcoat.kernels.adamw_step import Plan, StepScalars, StepTensors, reference_step
from overcoat.optim.step import StepGroup

# Staging buffers: one is filled, one is stepped, one is emptied.
SLOTS = 3


def check_offload_options(offload: bool, offload_buffer: int) -> None:
    """ValueError for what `AdamW` does not take."""
    if not isinstance(offload, bool):
        raise ValueError(f"offload {offload!r} must be True (states in host memory) or False")
    if isinstance(offload_buffer, bool) or not isinstance(offload_buffer, int) or offload_buffer < 1:
        raise ValueError(f"offload_buffer {offload_buffer!r} must be a number of bytes, for example {192 * 2**20}")


# ---- pieces of parameters ----------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Units `start` to `stop` of the parameter number `owner`: rows of a matrix, or groups of a vector.

    Units are never cut: a piece is stepped like a parameter of its own.
    """

    owner: int
    start: int
    stop: int
    units: int  # of the whole parameter
    width: int  # elements of a unit
    groups: int  # of a unit
    is_matrix: bool

    @classmethod
    def whole(cls, owner: int, shape: torch.Size, group_size: int) -> Piece:
        """All of a parameter."""
        rows, columns, groups = rows_of(shape, group_size)
        if len(shape) > 1:
            units = rows if columns else 0
            return cls(owner, 0, units, units, columns, groups, True)
        return cls(owner, 0, groups, groups, group_size, 1, False)

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.units

    @property
    def first_group(self) -> int:
        return self.start * self.groups

    @property
    def first_element(self) -> int:
        return self.start * self.width

    def of(self, tensor: Tensor) -> Tensor:
        """Its part of a contiguous tensor with one element for each of the parameter, or for each group."""
        if self.is_matrix:
            return tensor.view(self.units, -1)[self.start : self.stop]
        # A vector's last group may be short. One of a single element has one group: both slices are the same then.
        width = 1 if tensor.numel() == self.units else self.width
        return tensor.view(-1)[self.start * width : self.stop * width]


def states_of(tensors: StepTensors) -> dict[str, list[Tensor]]:
    """The lists of states that are there, without the step counts."""
    return {name: of for name, of in tensors.states.items() if of and name != "step"}


def cut(tensors: StepTensors, size: int) -> Iterator[list[Piece]]:
    """All parameters in chunks whose states take at most `size` bytes, packed; as few chunks as possible.

    Raises:
        ValueError: the states of a single row are larger.
    """
    chunk: list[Piece] = []
    room = size
    for owner, param in enumerate(tensors.params):
        states = [of[owner] for of in states_of(tensors).values()]
        rest = Piece.whole(owner, param.shape, tensors.group_size)
        while rest.start < rest.stop:
            piece = rest
            if _packed_bytes(rest, states) > room:
                unit = sum(rest._replace(stop=rest.start + 1).of(state).nbytes for state in states)
                units = max(room - ALIGNMENT * len(states), 0) // unit
                piece = rest._replace(stop=min(rest.start + units, rest.stop))
            if piece.start < piece.stop:
                chunk.append(piece)
                room -= _packed_bytes(piece, states)
                rest = rest._replace(start=piece.stop)
            elif chunk:
                yield chunk
                chunk, room = [], size
            else:
                raise ValueError(
                    f"offload: the states of one row of a parameter of shape {tuple(param.shape)} take {unit} bytes, a "
                    f"staging buffer has {size}; raise offload_buffer"
                )
    if chunk:
        yield chunk


def _packed_bytes(piece: Piece, states: list[Tensor]) -> int:
    return packed([piece.of(state).nbytes for state in states])[1]


# ---- the device's side -----------------------------------------------------------------------------------


class Staging:
    """Staging buffers on one device, and the streams of copies, for all step groups of an optimizer.

    Args:
        device: of the parameters.
        size: bytes of one buffer.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self.size = device, size
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.freed: list[Optional[torch.cuda.Event]] = [None] * SLOTS
        self.next_slot = 0
        if device.type == "cuda":
            self.copy_in, self.copy_out = (torch.cuda.Stream(device) for _ in range(2))
            self.copy_in.wait_stream(torch.cuda.current_stream(device))
            for slot in self.slots:
                slot.record_stream(self.copy_in)
                slot.record_stream(self.copy_out)

    def begin_step(self) -> None:
        """States that the last step wrote may be read again; until the next call each is stepped at most once."""
        if self.device.type == "cuda":
            self.copy_in.wait_stream(self.copy_out)

    def take_slot(self) -> int:
        """Chunks use the buffers in turn."""
        self.next_slot += 1
        return (self.next_slot - 1) % SLOTS

    @contextmanager
    def holding(self, chunk: Chunk) -> Iterator[None]:
        """Inside, the current stream finds the chunk's states on the device; what it makes of them goes back."""
        if self.device.type != "cuda":
            chunk.copy(to_device=True)
            yield
            chunk.copy(to_device=False)
            return
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.copy_in):
            freed = self.freed[chunk.slot]
            if freed is not None:
                self.copy_in.wait_event(freed)
            chunk.copy(to_device=True)
        current.wait_stream(self.copy_in)
        yield
        with torch.cuda.stream(self.copy_out):
            self.copy_out.wait_stream(current)
            chunk.copy(to_device=False)
            self.freed[chunk.slot] = self.copy_out.record_event()

    def synchronize(self) -> None:
        """Wait until all states are in host memory."""
        if self.device.type == "cuda":
            self.copy_out.synchronize()


class Chunk:
    """Pieces of parameters whose states fit into one staging buffer together.

    Args:
        whole: the step group's parameters and states in host memory.
        pieces: what the chunk has of them.
        staging: holds the buffers.
    """

    def __init__(self, whole: StepTensors, pieces: list[Piece], staging: Staging) -> None:
        self.slot = staging.take_slot()
        self.pieces = pieces
        host = [(piece, name, piece.of(of[piece.owner])) for piece in pieces for name, of in states_of(whole).items()]
        offsets, _ = packed([tensor.nbytes for _, _, tensor in host])
        states: dict[str, list[Tensor]] = {name: [] for name in whole.states}
        copies = []
        for (piece, name, tensor), offset in zip(host, offsets, strict=True):
            staged = staging.slots[self.slot][offset : offset + tensor.nbytes]
            states[name].append(staged.view(tensor.dtype).view(tensor.shape))
            copies.append((tensor, offset, piece.is_whole))
        self.spans = list(_merged(copies, staging.slots[self.slot]))
        self.tensors = whole._replace(
            params=[piece.of(whole.params[piece.owner]) for piece in pieces],
            states=states,
            keys=[whole.keys[piece.owner] for piece in pieces],
            first_groups=[whole.first_groups[piece.owner] + piece.first_group for piece in pieces],
        )
        self.plan: Any = Plan(self.tensors) if whole.kernel_runs() else None
        self.owners = torch.tensor([piece.owner for piece in pieces]).to(staging.device)
        self.first_elements = torch.tensor([piece.first_element for piece in pieces]).to(staging.device)

    def copy(self, *, to_device: bool) -> None:
        """All states, one way; on the current stream."""
        for host, staged in self.spans:
            if to_device:
                staged.copy_(host, non_blocking=True)
            else:
                host.copy_(staged, non_blocking=True)


def _merged(copies: list[tuple[Tensor, int, bool]], slot: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(host, staged) bytes to copy, for a host tensor, its offset in `slot` and whether it is of a whole parameter.

    The tensors of a whole parameter lie one after the other on both sides, with the same padding, and are copied at
    once. Between those of a part lie other parts, which must not be written back: another chunk may be doing that.
    """
    spans: list[list[Any]] = []  # [host storage, start, stop, offset in the slot]
    for tensor, offset, is_whole in copies:
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
        start = tensor.data_ptr() - memory.data_ptr()
        last = spans[-1] if spans and is_whole else None
        if last and last[0].data_ptr() == memory.data_ptr() and start - last[1] == offset - last[3]:
            last[2] = start + tensor.nbytes
        else:
            spans.append([memory, start, start + tensor.nbytes, offset])
    for memory, start, stop, offset in spans:
        yield memory[start:stop], slot[offset : offset + stop - start]


class OffloadedStepGroup(StepGroup):
    """A step group whose states are in host memory, step counts on the device; the other arguments are `StepGroup`'s.

    staging: the way between them.
    """

    def __init__(self, staging: Staging, *args: Any) -> None:
        self.staging = staging
        super().__init__(*args)
        self.chunks = [Chunk(self.tensors, pieces, staging) for pieces in cut(self.tensors, staging.size)]

    def _make_plan(self) -> None:
        """Each chunk has one."""

    def _launch(self, scalars: StepScalars, factor: Tensor, skip: Tensor, hyper: Hyper) -> None:
        for chunk in self.chunks:
            with self.staging.holding(chunk):
                addresses = self.gradients.addresses.index_select(0, chunk.owners)
                addresses += chunk.first_elements * self.gradients.dtype.itemsize
                skipped = skip.index_select(0, chunk.owners) if skip.dim() else skip
                of_pieces = StepScalars(*(values.index_select(0, chunk.owners) for values in scalars))
                chunk.plan.launch(addresses, self.gradients.dtype, of_pieces, factor, skipped, hyper)

    def _reference(self, grads: list[Tensor], lr: Tensor, factor: Tensor, skip: Tensor, hyper: Hyper) -> None:
        counters = self.tensors.states["step"]
        for chunk in self.chunks:
            # It counts steps: each piece has a counter of its own for that.
            chunk.tensors.states["step"][:] = [counters[piece.owner].clone() for piece in chunk.pieces]
            parts = [piece.of(grads[piece.owner]) for piece in chunk.pieces]
            skipped = skip.index_select(0, chunk.owners) if skip.dim() else skip
            with self.staging.holding(chunk):
                reference_step(chunk.tensors, parts, lr, factor, skipped, hyper)
        for counter, skipped in zip(counters, skip.expand(len(counters)), strict=True):
            counter += ~skipped
