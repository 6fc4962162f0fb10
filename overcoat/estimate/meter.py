"""What lives on the device, op by op: a dispatch mode that counts storages as they come and go.

A storage not seen before is an allocation, a weak reference tells when it is freed. That is what a GPU's caching
allocator sees, if two things are added which no op returns: what the ops of `EXPANDED` do inside, and the library's
workspaces. On the meta device a step of a 30B model takes half a second; on a CPU real steps are counted.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from overcoat.block.gathered import GatheredWeight
from overcoat.estimate.times import Work, tensors_in, work_of
from overcoat.kernels.attention import attention, attention_backward
from overcoat.kernels.loss import linear_cross_entropy
from overcoat.kernels.packed import ROWS_BETWEEN, is_starts

# Names of allocations that several modules give.
GRADIENTS, GATHERED = "gradients", "gathered"
# CUDA's caching allocator hands out multiples of this many bytes.
ALIGNMENT = 512
# Ops that are plain PyTorch on a GPU too: what they do inside is seen by running their reference.
EXPANDED: dict[Any, Callable[..., Any]] = {linear_cross_entropy: linear_cross_entropy.reference}

_aten = torch.ops.aten
_READ_VALUE = _aten._local_scalar_dense.default


def aligned(size: int) -> int:
    """Bytes that an allocation of `size` bytes takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


# ---- the library's workspaces -------------------------------------------------------------------------------------


def workspace(func: Any, args: Sequence[Any]) -> int:
    """Bytes that attention allocates inside on a GPU and frees before it returns.

    The fused backward (cuDNN's and FlashAttention's) adds up dq in FP32 and keeps sum(do * o) per query. With
    grouped-query heads it holds dk and dv of every query head before it adds them up. Both as measured on an H200 with
    cuDNN, to 1 MiB (results/attention-workspaces.jsonl). With a mask there is an additive copy of it; the
    memory-efficient kernel, which runs where cuDNN takes none, repeats k and v. Packed sequences leave rows of dq
    between documents.
    """
    if func is attention_backward:
        do, _, _, _, mask, batch, num_q, num_kv, *last = args
        mask, made = _all_pairs(mask, do, batch)
        grouped = 2 * aligned(do.nbytes) if _is_grouped(mask) and num_q != num_kv else 0
        documents = len(mask) - 1 if is_starts(mask) else batch if mask is None and any(last[3:]) else 0  # a window
        rows = do.shape[0] + ROWS_BETWEEN * documents
        return _accumulators(rows * do.shape[1], rows * num_q) + grouped + _masked(do, mask, num_q, num_kv) + made
    if func is attention:
        qkv, mask, batch, num_q, num_kv, *_ = args
        q_columns = qkv.shape[1] * num_q // (num_q + 2 * num_kv)
        mask, made = _all_pairs(mask, qkv, batch)
        return _masked(qkv[:, :q_columns], mask, num_q, num_kv) + made
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        q, k = args[1], args[2]  # (B, heads, S, D)
        repeated = 2 * q.nbytes if k.shape[1] != q.shape[1] else 0
        return _accumulators(q.numel(), math.prod(q.shape[:3])) + repeated
    return 0


def _accumulators(elements: int, queries: int) -> int:
    return aligned(4 * elements) + aligned(4 * queries)


def _all_pairs(mask: Tensor | None, x: Tensor, batch: int) -> tuple[Tensor | None, int]:
    """The mask that a kernel gets for x (T, columns), and its bytes where it is made for it: of `starts`, in FP32."""
    if not is_starts(mask) or x.dtype != torch.float32:
        return mask, 0
    sequence = x.shape[0] // batch
    dense = torch.empty((batch, 1, sequence, sequence), dtype=torch.bool, device="meta")
    return dense, aligned(dense.nbytes)


def _is_grouped(mask: Tensor | None) -> bool:
    """Whether the kernel takes k and v as they are: cuDNN's (`kernels.attention.chosen`)."""
    return mask is None or is_starts(mask) or mask.shape[-1] % 128 == 0


def _masked(x: Tensor, mask: Tensor | None, num_q: int, num_kv: int) -> int:
    """For `x` (T, num_q * D), one of q, o and their gradients."""
    if mask is None or is_starts(mask):
        return 0
    repeated = 2 * aligned(x.nbytes) if num_q != num_kv and not _is_grouped(mask) else 0
    sequence = mask.shape[-1]
    rows = mask.numel() // sequence * (sequence + -sequence % 16)
    return aligned(rows * x.element_size()) + repeated


class LibraryAttention(TorchFunctionMode):
    """On the meta device `F.scaled_dot_product_attention` would take the path that holds all scores; on a GPU the fused
    kernels run, and this runs their shapes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention or args[0].device.type != "meta":
            return func(*args, **kwargs)
        mask, scale = kwargs.get("attn_mask"), kwargs.get("scale")
        if mask is None:
            causal = kwargs.get("is_causal", False)
            return _aten._scaled_dot_product_flash_attention(*args[:3], 0.0, causal, scale=scale)[0]
        q = args[0]
        bias = mask if mask.dtype == q.dtype else torch.empty_like(mask, dtype=q.dtype)
        bias = bias.expand(q.shape[0], q.shape[1], *mask.shape[-2:])
        return _aten._scaled_dot_product_efficient_attention(*args[:3], bias, True, scale=scale)[0]


def _own(tensor: Tensor) -> Tensor:
    """What a tensor without storage of its own lies in: this process' part of a sharded one (`to_local` would be an op
    here), the codes of a weight."""
    if isinstance(tensor, GatheredWeight):
        return tensor.held
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Shape(NamedTuple):
    """A tensor of its own on the meta device."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Shape:
        return Shape(tensor.shape, tensor.stride(), tensor.dtype)

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


class Done(NamedTuple):
    """An op that has run: its result, what it did (times.py), and the workspace that it took."""

    out: Any
    work: tuple[str, float] | None
    workspace: int


# By the op and what it is given: on meta tensors only shapes count, one op takes up to 18 ms, and 32 layers are alike.
_done: dict[Any, Done] = {}
_SELF = object()  # the result of an op that writes to its first argument and returns it


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Done:
    """Run an op; on meta tensors remembered, but for results that lie in the memory of other arguments."""
    # `resize_` and the like change shapes.
    fixed = not (func.is_view or torch.Tag.inplace_view in func.tags)
    key = (func, _described(args), _described(list(kwargs.items()))) if fixed else None
    known = _done.get(key)
    if known is not None:
        return Done(args[0] if known.out is _SELF else _made(known.out), known.work, known.workspace)
    out = func(*args, **kwargs)
    done = Done(out, work_of(func, args, kwargs, out), workspace(func, args))
    given, made = tensors_in((args, kwargs)), tensors_in(out)
    if fixed and all(type(x) in (Tensor, nn.Parameter) and x.is_meta for x in (*given, *made)):
        own = {x.untyped_storage()._cdata for x in made if x.nbytes == x.untyped_storage().nbytes()}
        if args and out is args[0]:
            _done[key] = done._replace(out=_SELF)
        elif len(own - {x.untyped_storage()._cdata for x in given}) == len(made):
            _done[key] = done._replace(out=tree_map_only(Tensor, Shape.of, out))
    return done


def _made(value: Any) -> Any:
    if isinstance(value, Shape):
        return value.tensor()
    return type(value)(map(_made, value)) if isinstance(value, (list, tuple)) else value


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype, value.is_meta
    return tuple(map(_described, value)) if isinstance(value, (list, tuple)) else (type(value), value)


class Living(NamedTuple):
    """Bytes that live in a phase: at its fullest moment, by category, and at its end."""

    label: str
    fullest: dict[str, int]
    end: int


# ---- the mode -----------------------------------------------------------------------------------------------------


class Meter(TorchDispatchMode):
    """Counts what the ops inside it allocate and free; `work` is told of every op (times.py).

    answer: what a value read from a meta tensor is taken for. transformers asks its inputs two questions, whether
    nothing is padded and whether no row is packed. marks: (label, number of events before it). tags: of allocations by
    their number.
    """

    def __init__(self, answer: bool = True, work: Work | None = None) -> None:
        super().__init__()
        self.answer, self.work = answer, work
        self.marks: list[tuple[str, int]] = []
        self.tags: dict[int, str] = {}
        self._events: list[tuple[int, int]] = []  # (number of the allocation, bytes that it adds)
        self._allocations: list[tuple[int, str]] = []  # bytes, the phase it was made in
        self._numbers: dict[int, int] = {}  # of living allocations, by their storage
        self._references: dict[int, Any] = {}
        self._outside: list[Any] = []

    @property
    def count(self) -> int:
        """Number of allocations so far."""
        return len(self._allocations)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors, which were there before."""
        for tensor in tensors:
            storage = _own(tensor).untyped_storage()
            self._outside.append(storage)  # kept, so that no other storage gets its address
            self._numbers[storage._cdata] = -1

    def mark(self, label: str) -> None:
        """Here begins the phase `label`."""
        self.marks.append((label, len(self._events)))

    def tag(self, tensor: Tensor, name: str) -> None:
        """Remember what a living tensor is; the last name wins."""
        number = self._numbers.get(tensor.untyped_storage()._cdata, -1)
        if number >= 0:
            self.tags[number] = name

    def alive(self) -> set[int]:
        """Numbers of the allocations that live now."""
        return {number for number in self._numbers.values() if number >= 0}

    def place(self, number: int) -> str:
        """The phase in which an allocation was made."""
        return self._allocations[number][1]

    def stop(self) -> None:
        """Look no more at what is freed."""
        self._references.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _READ_VALUE and args[0].device.type == "meta":
            return self.answer
        if func in EXPANDED:
            with self:
                return EXPANDED[func](*args, **kwargs)
        is_dry = self.work is not None
        done = run(func, args, kwargs) if is_dry else Done(func(*args, **kwargs), None, workspace(func, args))
        if self.work is not None and done.work is not None:
            self.work.add(*done.work, bool(self.marks) and "backward" in self.marks[-1][0])
        for tensor in tensors_in(done.out):
            self._see(_own(tensor).untyped_storage())
        if done.workspace:
            number = self._allocate(done.workspace)
            self._events.append((number, -done.workspace))
        return done.out

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew that has been given, or has given back, its memory (`watch_resizes`)."""
        number = self._numbers.get(storage._cdata)
        if number == -1:
            return
        if number is not None:
            self._free(storage._cdata, number, None)
        if storage.nbytes():
            self._see(storage)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._numbers:
            number = self._numbers[key] = self._allocate(aligned(storage.nbytes()))
            self._references[number] = weakref.ref(storage, functools.partial(self._free, key, number))

    def _allocate(self, size: int) -> int:
        self._allocations.append((size, self.marks[-1][0] if self.marks else ""))
        self._events.append((self.count - 1, size))
        return self.count - 1

    def _free(self, key: int, number: int, _reference: Any) -> None:
        self._references.pop(number, None)
        if self._numbers.get(key) == number:
            del self._numbers[key]
            self._events.append((number, -self._allocations[number][0]))

    @contextlib.contextmanager
    def watch_resizes(self) -> Iterator[None]:
        """Inside, storages are counted as they are resized, as FSDP2 resizes those of gathered parameters."""
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

    def account(self, categories: Sequence[str]) -> list[Living]:
        """Living bytes of each phase, in order; categories: one for each allocation in the order of their numbers."""
        found, total, sizes = [], 0, dict.fromkeys(sorted(set(categories)), 0)
        begins = [*(begin for _, begin in self.marks), len(self._events)]
        for number, size in self._events[: begins[0]]:
            sizes[categories[number]] += size
            total += size
        for (label, begin), end in zip(self.marks, begins[1:], strict=True):
            most, fullest = total, dict(sizes)
            for number, size in self._events[begin:end]:
                sizes[categories[number]] += size
                total += size
                if total > most:
                    most, fullest = total, dict(sizes)
            found.append(Living(label, fullest, total))
        return found
