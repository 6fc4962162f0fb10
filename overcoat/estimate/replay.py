"""Run equal blocks of a dry run once: record what a block's forward or backward does, and replay it for the others.

A model has tens of blocks with the same constants and shapes, and a dry run's time is that of their ops. Each block is
one autograd node (block/run.py), so only the `Meter` sees what happens inside, and a replay can update it directly.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from overcoat.block import run
from overcoat.estimate.meter import META, Meter, described, own
from overcoat.estimate.times import Work, tensors_in


class Place(NamedTuple):
    """Place of a result's tensor in an allocation. Offsets of arguments do not change bytes and are ignored."""

    allocation: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a tensor at this place of a storage."""
        return torch.empty(0, dtype=self.dtype, device=META).set_(storage, self.offset, self.shape, self.stride)


class Played(NamedTuple):
    """Recorded effects of a function. Its own allocations are 0, 1, ...; those of the tensors it was given ~0, ~1, ...

    sizes: of its own. events: as the Meter's. storages: bytes of its own that live on. result: with a `Place` for each
    tensor. emptied: which arguments are lists that it emptied.
    """

    sizes: list[int]
    events: list[tuple[int, int]]
    storages: dict[int, int]
    result: Any
    emptied: list[int]
    work: Work


# By function and description of its arguments.
_played: dict[Any, Played] = {}


@contextlib.contextmanager
def alike_blocks(meter: Meter) -> Iterator[None]:
    """Run the forward and the backward of equal blocks once inside the context, and replay the others."""
    functions = {name: getattr(run, name) for name in ("block_forward", "block_backward")}
    for name, function in functions.items():
        setattr(run, name, functools.partial(_once, meter, function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(run, name, function)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Disable dispatch modes inside the context."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def _once(meter: Meter, function: Callable[..., Any], *args: Any) -> Any:
    if _get_current_dispatch_mode() is not meter:  # in another thread
        return function(*args)
    with _unseen():
        storages = [own(tensor).untyped_storage() for tensor in tensors_in(args)]
        given = [meter.numbers.get(storage._cdata, -1) for storage in storages]
        shared = tuple([number if number < 0 else given.index(number) for number in given])
        key = function, "backward" in meter.label, described(args), shared
        if (known := _played.get(key)) is not None:
            return _again(meter, known, storages, args)
    del storages  # a backward frees what it was given
    first, begin, whole, done = meter.count, len(meter.events), meter.work, Work()
    assert whole is not None
    meter.work = done
    result = function(*args)
    meter.work = whole
    whole.include(done)
    with _unseen():
        if (known := _seen(meter, given, first, begin, args, result, done)) is not None:
            _played[key] = known
    return result


def _seen(
    meter: Meter, given: Sequence[int], first: int, begin: int, args: Sequence[Any], result: Any, work: Work
) -> Optional[Played]:
    """Return the effects since allocation `first` and event `begin`. None where something came or went besides the
    tensors given and returned, as tables that a model's first step makes and keeps."""
    names = {number: ~place for place, number in reversed([*enumerate(given)]) if number >= 0}
    names |= {number: number - first for number in range(first, meter.count)}
    events, living = meter.events[begin:], {number for number in meter.alive() if number >= first}
    tensors = {meter.number(tensor): tensor for tensor in tensors_in(result)}
    if not {*dict(events), *tensors} <= {*names} or not living <= {*tensors}:
        return None

    def place(x: Tensor) -> Place:
        return Place(names[meter.number(x)], x.dtype, int(x.storage_offset()), x.shape, x.stride())

    return Played(
        sizes=[size for size, _ in meter.allocations[first:]],
        events=[(names[number], size) for number, size in events],
        storages={names[number]: tensors[number].untyped_storage().nbytes() for number in living},
        result=_with(result, Tensor, place),
        emptied=[place for place, value in enumerate(args) if value == []],
        work=work,
    )


def _again(meter: Meter, known: Played, storages: list[torch.UntypedStorage], args: Sequence[Any]) -> Any:
    """Replay a recorded call for equal arguments: update the meter, and return an equal result."""
    first = meter.count
    made = {name: torch.UntypedStorage(size, device=META) for name, size in known.storages.items()}
    places = made | {~place: storage for place, storage in enumerate(storages)}
    result = _with(known.result, Place, lambda place: place.tensor(places[place.allocation]))
    meter.allocations += [(size, meter.label) for size in known.sizes]
    for name, size in known.events:
        if name < 0:
            meter.free(storages[~name])
        else:
            meter.events.append((first + name, size))
    for name, storage in made.items():
        meter.adopt(storage, first + name)
    assert meter.work is not None
    meter.work.include(known.work)
    for place in known.emptied:
        args[place].clear()
    return result


def _with(value: Any, kind: type, make: Callable[[Any], Any]) -> Any:
    """Return a copy of nested lists and tuples with each value of type `kind` replaced by `make` of it."""
    if isinstance(value, kind):
        return make(value)
    if isinstance(value, (list, tuple)):
        parts = [_with(part, kind, make) for part in value]
        return parts if type(value) is list else value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value
