"""Steps of some parameters at a time, as backward completes their gradients: what `release_gradients` does with them.

A backward pass asks for dozens of them, so the host's time for one counts. Buckets with their tables are kept for each
set of parameters that came together before. And what depends on the step counts, two powers and a dozen small
operations on a GPU, is computed at once for all parameters of a group, those of the last backward pass, when the first
gradient arrives; the counts themselves are written when backward ends.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from overcoat.optim.adamw import AdamW
from overcoat.optim.arguments import Hyper, adamw_launch, sum_squares
from overcoat.optim.bucket import Bucket, scalar_on
from overcoat.optim.roster import kind_of


class Entry(NamedTuple):
    """A parameter, with the number of its group and its own in the optimizer, and its completed gradient."""

    group_number: int
    param_number: int
    param: Tensor
    grad: Tensor


class Batch:
    """Completed gradients on one device that wait for their step, and the stream that made them."""

    def __init__(self, device: torch.device) -> None:
        self.raw_stream, self.stream = raw_stream(device), current_stream(device)
        self.entries: list[Entry] = []
        self.bytes = 0

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.bytes += _bytes(entry.grad)


def current_stream(device: torch.device) -> Optional[torch.cuda.Stream]:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def raw_stream(device: torch.device) -> int:
    """The current stream's number: asked for every gradient, in a tenth of the time."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def _bytes(grad: Tensor) -> int:
    """Bytes of a gradient; of a sharded one the same on every process, since all must step the same batches."""
    total = grad.numel() * grad.element_size()
    if isinstance(grad, DTensor):
        sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
        total //= math.prod(size for placement, size in sizes if isinstance(placement, Shard))
    return total


class ReleasedSteps:
    """The steps between two calls of `optimizer.step()`."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer
        self.buckets: dict[Any, Bucket] = {}
        self.used: dict[Any, Bucket] = {}  # since the last call, in their order
        self.sums: list[Tensor] = []  # of squares, (T,)
        self.stepped = False  # since the last call
        self.moved = False  # whether a weight may have moved since the last call
        self.foresights: dict[Any, Foresight] = {}

    @torch.no_grad()
    def step(self, batch: Batch) -> None:
        """Step every parameter of a batch; one whose gradient is not finite is skipped alone."""
        if not self.stepped:
            self.optimizer.begin_step()
            self.stepped = True
        parts: dict[Any, list[Entry]] = {}
        for entry in batch.entries:
            parts.setdefault((entry.group_number, *kind_of(entry.param, entry.grad)), []).append(entry)
        for kind, entries in parts.items():
            bucket = self._bucket(kind, entries)
            bucket.take_gradients([entry.grad for entry in entries])
            group = self.optimizer.param_groups[kind[0]]
            prepared = self._prepared(kind[0], group, bucket)
            factor, skip = self.optimizer.constants(bucket.device)
            if self.optimizer.check_finite:
                squares, skip = bucket.sums_of_squares(None if prepared is None else prepared.sums)
                self.sums.append(squares)
            if prepared is not None:
                skip = prepared.take(skip)
            bucket.step(group, factor, skip, None if prepared is None else prepared.upcoming)
            self.optimizer.keep_if_captured([bucket], prepared, self.foresights.get((kind[0], bucket.device)))

    def _bucket(self, kind: Any, entries: list[Entry]) -> Bucket:
        numbers = [entry.param_number for entry in entries]
        key = (*kind, *numbers)
        bucket = self.buckets.get(key)
        if bucket is None or not bucket.serves():
            group = self.optimizer.param_groups[kind[0]]
            bucket = self.optimizer.bucket_of(group, [entry.param for entry in entries], numbers)
            self.buckets[key] = bucket
        self.used[key] = bucket
        self.moved = True
        return bucket

    def _prepared(self, number: int, group: dict[str, Any], bucket: Bucket) -> Optional[Prepared]:
        """What was computed ahead for a bucket; nothing for a new one, nor where the kernel does not take it."""
        foresight = self.foresights.get((number, bucket.device))
        if foresight is None or not bucket.fused() or not foresight.look(group):
            return None
        return foresight.prepared.get(bucket)

    def count(self) -> None:
        """Write the step counts of what has been stepped since the last call."""
        for foresight in self.foresights.values():
            foresight.count()

    def let_go(self) -> None:
        """Drop all buckets, with the states that they hold."""
        self.count()
        self.buckets, self.used, self.foresights = {}, {}, {}

    def end(self) -> None:
        """The end of a step: what `optimizer.step()` reports of it, and what the next one will need."""
        if not self.stepped:
            return
        optimizer = self.optimizer
        if self.sums:
            device = self.sums[0].device
            sums = torch.cat([part.to(device) for part in self.sums])
            optimizer.grad_norm = sums.sum().sqrt().float()
            optimizer.count_skipped((~(sums < math.inf)).sum())
        else:
            optimizer.grad_norm = None
        by_group: dict[Any, list[Bucket]] = {}
        for key, bucket in self.used.items():
            if bucket.plan is not None:
                by_group.setdefault((key[0], bucket.device), []).append(bucket)
        for key, buckets in by_group.items():
            foresight = self.foresights.get(key)
            if foresight is None or list(foresight.prepared) != buckets:
                self.foresights[key] = Foresight(buckets)
        for foresight in self.foresights.values():
            foresight.fresh = None
        self.buckets, self.used, self.sums = self.used, {}, []
        self.stepped = self.moved = False


class Foresight:
    """What the coming steps of some buckets, of one group and device, need and depends on their step counts.

    Every bucket has rows of its own in each of the tensors below, from a multiple of 16 on: so every part of them is
    aligned to 16 bytes.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        device = buckets[0].device
        self.options = buckets[0].arguments.options
        self.fresh: Optional[bool] = None  # whether the steps below are the coming ones; None: not looked yet
        self.counters: list[Tensor] = []
        starts = []
        for bucket in buckets:
            starts.append(len(self.counters))
            self.counters += bucket.arguments.states["step"]
            between = torch.zeros((), device=device)  # a counter that nobody reads
            self.counters += [between] * (-len(self.counters) % 16)
        self.addresses = list(map(Tensor.data_ptr, self.counters))
        self.table = adamw_launch.Table.of_counters(self.counters)
        count = len(self.counters)
        self.steps = torch.zeros(count, device=device)
        self.squares = torch.zeros(count, dtype=torch.float64, device=device)
        self.coefficients = torch.zeros(count, 3, device=device)
        self.skips = torch.ones(count, dtype=torch.bool, device=device)
        self.prepared = {
            bucket: Prepared(self, slice(start, start + len(bucket.owners)))
            for bucket, start in zip(buckets, starts, strict=True)
        }

    def look(self, group: dict[str, Any]) -> bool:
        """Find numbers and coefficients of the coming steps, once; False if the counters have moved."""
        if self.fresh is None:
            self.fresh = list(map(Tensor.data_ptr, self.counters)) == self.addresses
            if self.fresh:
                lr = scalar_on(group["lr"], self.steps.device)
                upcoming = self.table.foresee_step(lr, self.options(Hyper.of(group)))
                self.steps.copy_(upcoming.steps)
                self.coefficients.copy_(upcoming.coefficients)
        return self.fresh

    def count(self) -> None:
        """Write the counts of the steps that have been taken and not been counted."""
        if any(part.taken for part in self.prepared.values()):
            self.table.count_step(self.skips)
            self.skips.fill_(True)
            for part in self.prepared.values():
                part.taken = False


class Prepared:
    """The parts of a `Foresight` that belong to one bucket of T parameters, for the kernels to read and write.

    It does not hold the `Foresight`: in a cycle the states of both would outlive what has let go of them.
    """

    def __init__(self, foresight: Foresight, rows: slice) -> None:
        self.taken = False  # the bucket has been stepped and not been counted
        self.upcoming = adamw_launch.Upcoming(foresight.steps[rows], foresight.coefficients[rows])
        self.sums = sum_squares.Sums(foresight.squares[rows], foresight.skips[rows])
        self.skip = self.sums.skips.view(()) if len(self.sums.skips) == 1 else self.sums.skips

    def take(self, skip: Tensor) -> Tensor:
        """Take note that the bucket is stepped, unless skip; returns skip as the step wants it, (T,) or 0-d."""
        self.taken = True
        if skip is not self.sums.skips:
            self.sums.skips.copy_(skip)
        return self.skip
