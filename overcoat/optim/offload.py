"""Optimizer offload: moments and remainders are in host memory and pass through the GPU in chunks during a step.

    copy-in stream    [chunk 0][chunk 1][chunk 2]          [chunk 3] ...
    current stream             [step 0] [step 1] [step 2]           ...
    copy-out stream                     [chunk 0][chunk 1][chunk 2] ...

All states of a parameter are in one page-locked buffer; step counts stay on the GPU. A chunk is whatever fits into one
of SLOTS staging buffers: parameters, or some rows of a large matrix. Rows are never split and random numbers depend on
the group's number in the whole parameter, so results equal those without offload bit for bit. Events order the streams;
the host never waits. When `step` returns the last chunks are still being copied: read states through `state_dict()`,
which waits and copies, or after `torch.cuda.synchronize()`. On a CPU the same code copies between plain tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.kernels.adamw import Hyper, rows_of
from overcoat.kernels.adamw_step import Plan, StepTensors, reference_step
from overcoat.optim.step import StepGroup
from overcoat.pinned_memory import ALIGNMENT, packed

# Staging buffers: one is filled, one is stepped, one is emptied.
SLOTS = 3


def check_offload_options(offload: bool, offload_buffer: int) -> None:
    """Raise ValueError if `AdamW`'s offload options are not valid."""
    if not isinstance(offload, bool):
        raise ValueError(f"offload {offload!r} must be True (states in host memory) or False")
    if isinstance(offload_buffer, bool) or not isinstance(offload_buffer, int) or offload_buffer < 1:
        raise ValueError(f"offload_buffer {offload_buffer!r} must be a number of bytes, for example {192 * 2**20}")


class Piece(NamedTuple):
    """Rows `start` to `stop` of parameter number `owner`, viewed as a matrix; stepped like a parameter of its own."""

    owner: int
    start: int
    stop: int
    rows: int  # of the whole parameter; 1 for a vector
    columns: int
    groups: int  # of a row

    def of(self, tensor: Tensor) -> Tensor:
        """Return this piece of a contiguous tensor with one value per element, or per group, of the parameter."""
        return tensor.view(self.rows, -1)[self.start : self.stop]

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.rows


def states_of(tensors: StepTensors) -> dict[str, list[Tensor]]:
    """Return the lists of states without the step counts."""
    return {name: of for name, of in tensors.states.items() if of and name != "step"}


def cut(tensors: StepTensors, size: int) -> Iterator[list[Piece]]:
    """Yield all parameters in as few chunks as possible whose packed states take at most `size` bytes each.

    ValueError: the states of a single row are larger.
    """
    chunk: list[Piece] = []
    room = size
    for owner, param in enumerate(tensors.params):
        states, start = [of[owner] for of in states_of(tensors).values()], 0
        rows, columns, groups = rows_of(param.shape, tensors.group_size)
        while start < rows and columns:
            piece = Piece(owner, start, rows, rows, columns, groups)
            if _packed_bytes(piece, states) > room:
                of_row = sum(piece._replace(stop=start + 1).of(state).nbytes for state in states)
                fitting = max(room - ALIGNMENT * len(states), 0) // of_row
                piece = piece._replace(stop=min(start + fitting, rows))
            if piece.start < piece.stop:
                chunk.append(piece)
                room -= _packed_bytes(piece, states)
                start = piece.stop
            elif chunk:
                yield chunk
                chunk, room = [], size
            else:
                raise ValueError(
                    f"offload: the states of one row of a parameter of shape {tuple(param.shape)} take {of_row} bytes, "
                    f"a staging buffer has {size}; raise offload_buffer"
                )
    if chunk:
        yield chunk


def _packed_bytes(piece: Piece, states: list[Tensor]) -> int:
    return packed([piece.of(state).nbytes for state in states])[1]


# ---- the device's side -----------------------------------------------------------------------------------


class Staging:
    """Staging buffers of `size` bytes on one device, and the streams of copies, for all step groups of an optimizer."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self.size = device, size
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.freed: list[Optional[torch.cuda.Event]] = [None] * SLOTS
        self.chunks = itertools.count()  # they use the buffers in turn
        if device.type == "cuda":
            self.copy_in, self.copy_out = (torch.cuda.Stream(device) for _ in range(2))
            self.copy_in.wait_stream(torch.cuda.current_stream(device))
            for slot in self.slots:
                slot.record_stream(self.copy_in)
                slot.record_stream(self.copy_out)

    def begin_step(self) -> None:
        """Let copies in wait for the last step's copies out. Until the next call each state is stepped at most once."""
        if self.device.type == "cuda":
            self.copy_in.wait_stream(self.copy_out)

    @contextmanager
    def holding(self, chunk: Chunk) -> Iterator[None]:
        """Provide the chunk's states on the device for the current stream; changes are copied back at the end."""
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
    """Pieces of a step group's parameters whose states fit into one staging buffer together.

    whole: the step group's tensors, states in host memory.
    """

    def __init__(self, whole: StepTensors, pieces: list[Piece], staging: Staging) -> None:
        self.slot = next(staging.chunks) % SLOTS
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
            first_groups=[whole.first_groups[piece.owner] + piece.start * piece.groups for piece in pieces],
        )
        self.plan: Any = Plan(self.tensors) if whole.kernel_runs() else None
        self.owners = torch.tensor([piece.owner for piece in pieces]).to(staging.device)
        self.first_elements = torch.tensor([piece.start * piece.columns for piece in pieces]).to(staging.device)

    def copy(self, *, to_device: bool) -> None:
        """Copy all states, in one direction, on the current stream."""
        for host, staged in self.spans:
            if to_device:
                staged.copy_(host, non_blocking=True)
            else:
                host.copy_(staged, non_blocking=True)


def _merged(copies: list[tuple[Tensor, int, bool]], slot: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (host, staged) byte tensors to copy, merged where possible.

    copies: (host tensor, its offset in `slot`, True if its parameter is whole). The tensors of a whole parameter are
    consecutive on both sides, with the same padding, and are copied at once. Those of a part are not: other parts lie
    between them, which must not be overwritten, since another chunk may be writing them.
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
    """A step group with states in host memory and step counts on the device; other arguments as in `StepGroup`."""

    def __init__(self, staging: Staging, *args: Any) -> None:
        self.staging = staging
        super().__init__(*args)

    def _prepare(self) -> None:
        whole = self.with_states()
        self.chunks = [Chunk(whole, pieces, self.staging) for pieces in cut(whole, self.staging.size)]

    def _launch(self, counted: tuple[Tensor, Tensor], factor: Tensor, skip: Tensor, hyper: Hyper) -> None:
        for chunk in self.chunks:
            with self.staging.holding(chunk):
                addresses = self.gradients.addresses.index_select(0, chunk.owners)
                addresses += chunk.first_elements * self.gradients.dtype.itemsize
                skipped = skip.index_select(0, chunk.owners) if skip.dim() else skip
                of_pieces = counted[0].index_select(0, chunk.owners), counted[1].index_select(0, chunk.owners)
                chunk.plan.launch(addresses, self.gradients.dtype, of_pieces, factor, skipped, hyper)

    def _reference(self, grads: list[Tensor], lr: Tensor, factor: Tensor, skip: Tensor, hyper: Hyper) -> None:
        counters = [state["step"] for state in self.states()]
        for chunk in self.chunks:
            # The reference increments step counts, so each piece needs its own counter.
            chunk.tensors.states["step"][:] = [counters[piece.owner].clone() for piece in chunk.pieces]
            parts = [piece.of(grads[piece.owner]) for piece in chunk.pieces]
            skipped = skip.index_select(0, chunk.owners) if skip.dim() else skip
            with self.staging.holding(chunk):
                reference_step(chunk.tensors, parts, lr, factor, skipped, hyper)
        for counter, skipped in zip(counters, skip.expand(len(counters)), strict=True):
            counter += ~skipped


class StreamedStepGroup(OffloadedStepGroup):
    """A step group whose parameters are in host memory too, as copies on the device while it steps (streaming/).

    copies: of each parameter, where whoever holds the device memory puts it before the step, and reads it after.
    """

    def __init__(self, copies: list[Tensor], *args: Any) -> None:
        self.copies = copies
        super().__init__(*args)

    def _stepped(self) -> list[Tensor]:
        return self.copies
