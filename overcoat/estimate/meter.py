"""`Meter`, a dispatch mode that counts live storages on a device, op by op.

A new storage is an allocation, and a weak reference reports when it is freed. A GPU's caching allocator would see the
same, plus two things that no op returns: temporaries inside the ops of `EXPANDED`, and workspaces of libraries. On the
meta device a step of a 30B model takes half a second; on a CPU real steps are counted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from overcoat.block.linear import GatheredWeight
from overcoat.estimate.times import Grouped, Work, tensors_in, work_of
from overcoat.estimate.workspaces import aligned, workspace
from overcoat.kernels.loss import linear_cross_entropy

# Names of allocations that several modules give.
GRADIENTS, GATHERED = "gradients", "gathered"
# Ops that are plain PyTorch on a GPU too: what they do inside is seen by running their reference.
EXPANDED: dict[Any, Callable[..., Any]] = {linear_cross_entropy: linear_cross_entropy.reference}

_READ_VALUE = torch.ops.aten._local_scalar_dense.default
_INDEX_PUT = torch.ops.aten.index_put.default


def own(tensor: Tensor) -> Tensor:
    """Return the tensor that holds the storage: this process' part of a sharded one (`to_local` would be an op here),
    the codes of a gathered weight."""
    if isinstance(tensor, GatheredWeight):
        return tensor.held
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Done(NamedTuple):
    """An op that has run: how to make its result again, its work (times.py), and the bytes of its workspace."""

    recipe: Any
    work: tuple[str | Grouped, float] | None
    workspace: int

    def result(self, args: Any) -> Any:
        return args[0] if self.recipe is _SELF else _made(self.recipe)


# Cache by op and arguments: on meta tensors only shapes matter, one op takes up to 18 ms, and 32 layers are equal.
_done: dict[Any, Done] = {}
META = torch.device("meta")
_SELF = object()  # the recipe of an op that writes to its first argument and returns it
_NONE = object()  # of an op that must run again


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Done]:
    """Run an op; on meta tensors results are cached, unless they share memory with arguments other than the first."""
    if func.is_view:
        return func(*args, **kwargs), Done(_NONE, None, 0)
    key = _key(func, args, kwargs)
    known = _done.get(key)
    if known is not None:
        return known.result(args), known
    out = func(*args, **kwargs)
    done = Done(_NONE, work_of(func, args, kwargs, out), workspace(func, args))
    given, made = tensors_in((args, kwargs)), tensors_in(out)
    # `resize_` and the like change shapes.
    fixed = torch.Tag.inplace_view not in func.tags
    if fixed and all(type(x) in (Tensor, nn.Parameter) and x.is_meta for x in (*given, *made)):
        own = {x.untyped_storage()._cdata for x in made if x.nbytes == x.untyped_storage().nbytes()}
        if args and out is args[0]:
            done = _done[key] = done._replace(recipe=_SELF)
        elif len(own - {x.untyped_storage()._cdata for x in given}) == len(made):
            done = _done[key] = done._replace(recipe=tree_map_only(Tensor, _maker, out))
    return out, done


def _key(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func, described(args), described(kwargs.items()) if kwargs else None


def _maker(x: Tensor) -> Callable[[], Tensor]:
    """Return a function that makes tensors of the same shape on the meta device."""
    return functools.partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=META)


def _made(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_made(part) for part in value])
    return value() if type(value) is functools.partial else value


def described(values: Any) -> tuple[Any, ...]:
    """Return the cache key of an argument: of tensors kind, shape and dtype."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found += (type(value), value.shape, value.stride(), value.dtype, value.is_meta)
            if isinstance(value, GatheredWeight):  # codes, or the weight itself
                found.append(described((value.held, value.scale, value.w_amax)))
        elif isinstance(value, (list, tuple)):
            found += (type(value), described(value))
        else:
            found += (type(value), value)
    return tuple(found)


class Living(NamedTuple):
    """Live bytes of a phase: at its peak, by category, and at its end."""

    label: str
    fullest: dict[str, int]
    end: int


# ---- the mode -----------------------------------------------------------------------------------------------------


class Meter(TorchDispatchMode):
    """Counts what the ops inside it allocate and free, and adds every op to `work` (times.py).

    answer: the value of any bool read from a meta tensor. transformers reads two of its inputs: that nothing is padded,
    and that no row is packed. marks: (label, number of events before it). tags: names of allocations, by number.
    """

    def __init__(self, answer: bool = True, work: Work | None = None) -> None:
        super().__init__()
        self.answer, self.work, self.label = answer, work, ""
        self.marks: list[tuple[str, int]] = []
        self.tags: dict[int, str] = {}
        self.events: list[tuple[int, int]] = []  # (number of the allocation, bytes that it adds)
        self.allocations: list[tuple[int, str]] = []  # bytes, the phase it was made in
        self.numbers: dict[int, int] = {}  # of living allocations, by their storage
        self._references: dict[int, Any] = {}
        self._outside: list[Any] = []
        self._regions: list[str] = []  # open `record_function`s: the name of what FSDP2 allocates in its own, or ""

    @property
    def count(self) -> int:
        """Number of allocations so far."""
        return len(self.allocations)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors, which were there before."""
        for tensor in tensors:
            storage = own(tensor).untyped_storage()
            self._outside.append(storage)  # kept, so that no other storage gets its address
            self.numbers[storage._cdata] = -1

    def mark(self, label: str) -> None:
        """Begin the phase `label`."""
        self.label = label
        self.marks.append((label, len(self.events)))

    def tag(self, tensor: Tensor, name: str) -> None:
        """Name a live tensor's allocation; the last name wins."""
        if (number := self.number(tensor)) >= 0:
            self.tags[number] = name

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's allocation; -1 if it is not counted."""
        return self.numbers.get(tensor.untyped_storage()._cdata, -1)

    def alive(self) -> set[int]:
        """Return the numbers of the live allocations."""
        return {number for number in self.numbers.values() if number >= 0}

    def places(self) -> list[str]:
        """Return the phase in which each allocation was made."""
        return [label for _, label in self.allocations]

    def stop(self) -> None:
        """Stop tracking frees."""
        self._references.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise PyTorch wraps `__torch_dispatch__` to skip it in compiled code, at 10 us a call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view and any(self._regions):  # thousands, of what the meter has seen
            return func(*args, **kwargs)
        if func is _READ_VALUE and args[0].device.type == "meta":
            return self.answer
        if func.namespace == "profiler":
            self._enter_or_exit(*args)
            return func(*args, **kwargs)
        if func is _INDEX_PUT and "backward" in self.label:
            # Autograd's of indexing: into zeros made for it, of which it makes a copy only under a dispatch mode.
            func = torch.ops.aten.index_put_.default
        if func in EXPANDED:
            with self:
                return EXPANDED[func](*args, **kwargs)
        if self.work is None:
            out, done = func(*args, **kwargs), Done(_NONE, None, workspace(func, args))
        else:
            out, done = run(func, args, kwargs)
        self._count(out, done)
        return out

    def _enter_or_exit(self, of: Any, *_: Any) -> None:
        """Follow `record_function`, inside which FSDP2 runs its hooks. Their time is `Times.links`, not `work`."""
        if not isinstance(of, str):
            self._regions.pop()
        elif of.startswith("FSDP::"):
            self._regions.append(GRADIENTS if of.startswith("FSDP::post_backward") else GATHERED)
        else:
            self._regions.append("")

    def _count(self, out: Any, done: Done) -> None:
        if self.work is not None and done.work is not None and not any(self._regions):
            self.work.add(*done.work, "backward" in self.label)
        for tensor in (out,) if type(out) is Tensor else tensors_in(out):
            self._see((tensor if type(tensor) is Tensor else own(tensor)).untyped_storage())
        if done.workspace:
            self.events.append((self._allocate(done.workspace), -done.workspace))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that was resized, from or to 0 bytes (`watch_resizes`)."""
        number = self.numbers.get(storage._cdata)
        if number == -1:
            return
        if number is not None:
            self.free(storage)
        if storage.nbytes():
            self._see(storage)

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.numbers:
            self.adopt(storage, self._allocate(aligned(storage.nbytes())))

    def _allocate(self, size: int) -> int:
        number = len(self.allocations)
        self.allocations.append((size, self.label))
        self.events.append((number, size))
        if self._regions and self._regions[-1]:
            self.tags[number] = self._regions[-1]
        return number

    def adopt(self, storage: torch.UntypedStorage, number: int) -> None:
        """Track a storage under an allocation's number until it is freed."""
        key = storage._cdata
        self.numbers[key] = number
        self._references[number] = weakref.ref(storage, functools.partial(self._free, key, number))

    def free(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as freed."""
        self._free(storage._cdata, self.numbers[storage._cdata], None)

    def _free(self, key: int, number: int, _reference: Any) -> None:
        self._references.pop(number, None)
        if self.numbers.get(key) == number:
            del self.numbers[key]
            self.events.append((number, -self.allocations[number][0]))

    @contextlib.contextmanager
    def watch_resizes(self) -> Iterator[None]:
        """Count resizes of storages inside the context: FSDP2 resizes those of gathered parameters."""
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self.resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            del torch.UntypedStorage.resize_

    def account(self, categories: Sequence[str], held: AbstractSet[int] = frozenset()) -> list[Living]:
        """Return the live bytes of each phase, in order.

        categories: one per allocation, by number. held: allocations that count as live to the end.
        """
        events = self.events
        if held:
            events = [(number, 0 if size < 0 and number in held else size) for number, size in events]
            events += [(number, -self.allocations[number][0]) for number in held]
        totals = [0, *itertools.accumulate(size for _, size in events)]
        found, sizes, place = list[Living](), dict.fromkeys(sorted(set(categories)), 0), 0
        begins = [*(begin for _, begin in self.marks), len(events)]
        for (label, begin), end in zip(self.marks, begins[1:], strict=True):
            fullest: dict[str, int] = {}
            for stop in (max(range(begin, end + 1), key=totals.__getitem__), end):
                for number, size in events[place:stop]:
                    sizes[categories[number]] += size
                fullest, place = fullest or dict(sizes), stop
            found.append(Living(label, fullest, totals[end]))
        return found
