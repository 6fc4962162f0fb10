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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor

from overcoat.kernels.adamw import Hyper, Piece, rows_of
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


def states_of(tensors: StepTensors) -> dict[str, list[Tensor]]:
    """Return the lists of states without the step counts."""
    return {name: of for name, of in tensors.states.items() if of and name != "step"}


def cut(tensors: StepTensors, wholes: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """Yield rows of parameters in as few chunks as possible whose packed states take at most `size` bytes each.

    ValueError: the states of a single row are larger.
    """
    chunk: list[Piece] = []
    room, states = size, list(states_of(tensors).values())
    for whole in wholes:
        start = whole.start
        while start < whole.stop and whole.layout.columns:
            piece = whole._replace(start=start)
            if _packed_bytes(piece, states) > room:
                of_row = sum(piece._replace(stop=start + 1).of(state).nbytes for state in states)
                fitting = max(room - ALIGNMENT * len(states), 0) // of_row
                piece = piece._replace(stop=min(start + fitting, whole.stop))
            if piece.start < piece.stop:
                chunk.append(piece)
                room -= _packed_bytes(piece, states)
                start = piece.stop
            elif chunk:
                yield chunk
                chunk, room = [], size
            else:
                shape = tuple(tensors.params[whole.owner].shape)
                raise ValueError(
                    f"offload: the states of one row of a parameter of shape {shape} take {of_row} bytes, "
                    f"a staging buffer has {size}; raise offload_buffer"
                )
    if chunk:
        yield chunk


def all_rows(tensors: StepTensors) -> list[Piece]:
    """Return each parameter as one piece."""
    layouts = [rows_of(param.shape, tensors.group_size) for param in tensors.params]
    return [Piece(owner, 0, layout.rows, layout) for owner, layout in enumerate(layouts)]


def _packed_bytes(piece: Piece, states: list[list[Tensor]]) -> int:
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

    whole: the step group's tensors, states in host memory. tensors: those of the pieces, as of parameters of their own.
    """

    def __init__(self, whole: StepTensors, pieces: list[Piece], staging: Staging) -> None:
        self.slot = next(staging.chunks) % SLOTS
        self.pieces = pieces
        host = [(piece, name, piece.of(of)) for piece in pieces for name, of in states_of(whole).items()]
        offsets, _ = packed([tensor.nbytes for _, _, tensor in host])
        states: dict[str, list[Tensor]] = {name: [] for name in whole.states}
        copies = []
        for (piece, name, tensor), offset in zip(host, offsets, strict=True):
            staged = staging.slots[self.slot][offset : offset + tensor.nbytes]
            states[name].append(staged.view(tensor.dtype))
            copies.append((tensor, offset, piece.is_whole))
        self.spans = list(_merged(copies, staging.slots[self.slot]))
        self.tensors = whole._replace(
            params=self.pieces_of(whole.params),
            states=states,
            keys=[whole.keys[piece.owner] for piece in pieces],
            first_groups=[whole.first_groups[piece.owner] + piece.start * piece.layout.groups for piece in pieces],
        )
        self.owners = torch.tensor([piece.owner for piece in pieces]).to(staging.device)

    def pieces_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return each piece's rows of tensors of the parameters' shapes, (rows, columns)."""
        return [piece.of(tensors).view(-1, piece.layout.columns) for piece in self.pieces]

    def of(self, values: Tensor) -> Tensor:
        """Return each piece's value of a tensor with one per parameter, (T, ...); a 0-d one, of all, as it is."""
        return values.index_select(0, self.owners) if values.dim() else values

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
        self.chunks = [Chunk(whole, pieces, self.staging) for pieces in cut(whole, all_rows(whole), self.staging.size)]
        if self.on_kernel:
            self.plans = [Plan(chunk.tensors) for chunk in self.chunks]
            firsts = [[piece.start * piece.layout.columns for piece in chunk.pieces] for chunk in self.chunks]
            self.first_elements = [torch.tensor(of).to(self.device) for of in firsts]

    def _launch(self, counted: tuple[Tensor, Tensor], factor: Tensor, skip: Tensor, hyper: Hyper) -> None:
        dtype = self.gradients.dtype
        for chunk, plan, firsts in zip(self.chunks, self.plans, self.first_elements, strict=True):
            with self.staging.holding(chunk):
                addresses = chunk.of(self.gradients.addresses)
                addresses += firsts * dtype.itemsize
                steps, coefficients = map(chunk.of, counted)
                plan.launch(addresses, dtype, (steps, coefficients), factor, chunk.of(skip), hyper)

    def _reference(self, grads: list[Tensor], lr: Tensor, factor: Tensor, skip: Tensor, hyper: Hyper) -> None:
        counters = [state["step"] for state in self.states()]
        for chunk in self.chunks:
            # The reference increments step counts, so each piece needs its own counter.
            chunk.tensors.states["step"][:] = [counters[piece.owner].clone() for piece in chunk.pieces]
            with self.staging.holding(chunk):
                reference_step(chunk.tensors, chunk.pieces_of(grads), lr, factor, chunk.of(skip), hyper)
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
