"""Step counts on the device: every parameter counts its own steps, without the host waiting.

A parameter's count is a 0-d tensor of its state; `Counters` has the addresses of all. What a step needs of the counts,
its number and `step_coefficients`, is two powers and a dozen small operations on a GPU. Where one step is many launches
(`optim.release`), `NextStep` computes it at once for all of them, and the counts are written at the end.

Legend: T tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, List, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.kernels.adamw import Hyper, step_coefficients
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, kernel
from overcoat.kernels.multi_tensor import Sums

# Step counters that one program counts.
BLOCK = 128


class StepScalars(NamedTuple):
    """The step that each of T parameters takes: its number, FP32 (T,), and `step_coefficients`, FP32 (T, 3)."""

    steps: Tensor
    coefficients: Tensor


@kernel
def _count_steps_kernel(counters, steps, skip, tensors, PER_TENSOR: tl.constexpr, BLOCK: tl.constexpr):
    """Increment every parameter's own step counter, unless skipped, and gather them: counters int64, steps (T,)."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tensor < tensors
    counter = tl.load(counters + tensor, mask, 0).to(tl.pointer_type(tl.float32))
    skipped = tl.load(skip + tensor, mask, 0) if PER_TENSOR else tl.load(skip)
    step = tl.load(counter, mask, 0.0) + tl.where(skipped, 0.0, 1.0)
    tl.store(counter, step, mask)
    tl.store(steps + tensor, step, mask)


class Counters:
    """The step counters of T parameters, 0-d FP32 tensors that lie anywhere on one device."""

    def __init__(self, counters: List[Tensor]) -> None:
        self.device, self.count = counters[0].device, len(counters)
        self.addresses = torch.tensor(list(map(Tensor.data_ptr, counters)), dtype=torch.int64).to(self.device)
        self.steps = torch.empty(self.count, dtype=torch.float32, device=self.device)

    def count_step(self, skip: Tensor) -> Tensor:
        """Count the step of every parameter; skip bool, 0-d or (T,). Returns all, FP32 (T,), until the next call."""
        _count_steps_kernel[(cdiv(self.count, BLOCK),)](
            self.addresses, self.steps, skip, self.count, skip.dim() > 0, BLOCK
        )
        return self.steps

    def take_step(self, lr: Tensor, skip: Tensor, hyper: Hyper) -> StepScalars:
        """The same, and return what the step needs."""
        return scalars_of(self.count_step(skip), lr, hyper)


def scalars_of(steps: Tensor, lr: Tensor, hyper: Hyper) -> StepScalars:
    return StepScalars(steps, step_coefficients(steps, lr, *hyper[:4]))


class NextStepPart(NamedTuple):
    """The rows of a `NextStep` that belong to one owner's T parameters, for the kernels to read and write."""

    scalars: StepScalars
    sums: Sums


class NextStep:
    """What the next step of some owners' parameters needs and depends on step counts.

    Every owner has rows of its own in each tensor below, from a multiple of 16 on: so every part of them is aligned to
    16 bytes.

    Args:
        counters: each owner's step counters.

    Attributes:
        parts: each owner's rows. They do not hold this: in a cycle the states of both would outlive what drops them.
        is_current: whether they are for the coming step; False: the counters have moved; None: not looked yet.
    """

    def __init__(self, counters: Mapping[Any, List[Tensor]]) -> None:
        device = next(iter(counters.values()))[0].device
        self.is_current: Optional[bool] = None
        self.taken = False  # steps have been taken and not been counted
        self.tensors: List[Tensor] = []
        rows: dict[Any, slice] = {}
        dummy_step = torch.zeros((), device=device)
        for owner, own in counters.items():
            rows[owner] = slice(len(self.tensors), len(self.tensors) + len(own))
            self.tensors += [*own, *[dummy_step] * (-len(own) % 16)]
        self.addresses = list(map(Tensor.data_ptr, self.tensors))
        self.counters = Counters(self.tensors)
        count = len(self.tensors)
        self.always = torch.ones((), dtype=torch.bool, device=device)
        self.scalars = StepScalars(torch.zeros(count, device=device), torch.zeros(count, 3, device=device))
        squares = torch.zeros(count, dtype=torch.float64, device=device)
        self.sums = Sums(squares, torch.ones(count, dtype=torch.bool, device=device))
        self.parts = {
            owner: NextStepPart(StepScalars(*(x[of] for x in self.scalars)), Sums(*(x[of] for x in self.sums)))
            for owner, of in rows.items()
        }

    def compute(self, lr: Tensor, hyper: Hyper) -> None:
        """Compute numbers and coefficients of the coming step, unless counters have moved."""
        self.is_current = list(map(Tensor.data_ptr, self.tensors)) == self.addresses
        if self.is_current:
            scalars = scalars_of(self.counters.count_step(self.always) + 1.0, lr, hyper)
            for own, new in zip(self.scalars, scalars, strict=True):
                own.copy_(new)

    def take(self, part: NextStepPart, skip: Tensor) -> Tensor:
        """Record that the step of a part is taken, unless skip (T,) or 0-d; returns it as (T,)."""
        self.taken = True
        if skip is not part.sums.skips:
            part.sums.skips.copy_(skip)
        return part.sums.skips

    def count(self) -> None:
        """Write the counts of the steps that have been taken and not been counted."""
        if self.taken:
            self.counters.count_step(self.sums.skips)
            self.sums.skips.fill_(True)
            self.taken = False
