"""Races between CUDA streams, found on a CPU: every access to shared memory must follow, by events, all that conflict.

`RaceDetector` gives a `Stream` lanes that are labels, events that are vector clocks, and watches every op that PyTorch
dispatches: which bytes it reads and writes, on which lane. Ops run at once, in the host's order; only the clocks say
what a GPU would have been free to do. An access conflicts with another lane's earlier write (or, if it writes, with any
earlier access) to the same bytes, unless an event orders them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from overcoat.block.linear import GatheredWeight

COMPUTE = "compute"
Clock = dict[str, int]


class RaceDetector(TorchDispatchMode):
    """While active, records accesses to the memory of `watch`, and collects `races` as text."""

    def __init__(self) -> None:
        super().__init__()
        self.lane = COMPUTE
        self.clocks: dict[str, Clock] = {}  # of each lane: how much of each other it has seen
        self.memory: list[tuple[str, int, int]] = []  # name, first and last address
        self.accesses: dict[str, list[tuple[int, int, str, int, bool]]] = {}
        self.races: list[str] = []

    # ---- what stands for CUDA's streams and events -----------------------------------------------------

    def clock(self, lane: str) -> Clock:
        return self.clocks.setdefault(lane, {lane: 1})

    def now(self) -> Clock:
        """An event of the current lane: all that it has done so far."""
        event = dict(self.clock(self.lane))
        self.clock(self.lane)[self.lane] += 1
        return event

    def wait(self, event: Clock | None) -> None:
        clock = self.clock(self.lane)
        for lane, count in (event or {}).items():
            clock[lane] = max(clock.get(lane, 0), count)

    @contextlib.contextmanager
    def on(self, lane: str, *events: Clock | None) -> Iterator[None]:
        before, self.lane = self.lane, lane
        for event in events:
            self.wait(event)
        try:
            yield
        finally:
            self.lane = before

    # ---- what is accessed ------------------------------------------------------------------------------

    def watch(self, name: str, tensor: Tensor) -> None:
        start = tensor.data_ptr()
        self.memory.append((name, start, start + tensor.nbytes))

    def watch_until_freed(self, name: str, tensor: Tensor, owner: str) -> None:
        """Watch memory of the allocator's, whose next owner may write to it on lane `owner` as soon as it is freed."""
        self.watch(name, tensor)
        start = tensor.data_ptr()
        weakref.finalize(tensor, self._freed, name, start, start + tensor.nbytes, owner)

    def _freed(self, name: str, start: int, stop: int, owner: str) -> None:
        with self.on(owner):
            self._check(name, start, stop, True, "freed")
        self.memory = [of for of in self.memory if of[0] != name]
        self.accesses.pop(name, None)

    def access(self, tensor: Tensor, writes: bool, what: str) -> None:
        if isinstance(tensor, GatheredWeight):
            for part in (tensor.held, tensor.scale, tensor.w_amax):
                if part is not None:
                    self.access(part, writes, what)
            return
        if tensor.device.type != "cpu" or not tensor.numel():
            return
        start = tensor.data_ptr()
        stop = start + tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
        stop = min(
            stop, start + (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1) * tensor.itemsize
        )
        for name, first, last in self.memory:
            if start < last and first < stop:
                self._check(name, start, stop, writes, what)

    def _check(self, name: str, start: int, stop: int, writes: bool, what: str) -> None:
        clock, earlier = self.clock(self.lane), self.accesses.setdefault(name, [])
        for first, last, lane, count, wrote in earlier:
            if first < stop and start < last and (writes or wrote) and clock.get(lane, 0) < count:
                kinds = "write" if writes else "read", "write" if wrote else "read"
                self.races.append(f"{name}: a {kinds[0]} on {self.lane} ({what}) beside a {kinds[1]} on {lane}")
        # What this access covers is dropped where whoever conflicts with it conflicts with this one as well.
        covered = [of for of in earlier if start <= of[0] and of[1] <= stop]
        for of in covered:
            if writes or (of[2] == self.lane and not of[4]):
                earlier.remove(of)
        earlier.append((start, stop, self.lane, clock[self.lane], writes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            for place, argument in enumerate(func._schema.arguments):
                value = kwargs.get(argument.name, args[place] if place < len(args) else None)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, Tensor):
                        self.access(tensor, writes, func.overloadpacket.__name__)
        return func(*args, **kwargs)
