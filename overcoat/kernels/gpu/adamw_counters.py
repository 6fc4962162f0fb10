"""Step counts on the device: every parameter counts its own steps, without the host waiting.

A parameter's count is a 0-d tensor of its state; `Table` has the addresses of all. What a step needs of the counts, its
number and `step_coefficients`, is two powers and a dozen small operations on a GPU. Where one step is many launches
(`optim.release`), `NextStep` computes it at once for all of them, and the counts are written at the end.

Legend: T tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, List, NamedTuple, Optional

import torch
from torch import Tensor

from overcoat.kernels.adamw import Hyper, step_coefficients
from overcoat.kernels.gpu.adamw import FIELDS, clear_weight_amax_kernel, count_steps_kernel
from overcoat.kernels.gpu.sum_squares import Sums
from overcoat.kernels.launch import cdiv, on_device

# Step counters that one program counts.
COUNTERS = 128
_GROUPS, _STEP, _WEIGHT_AMAX = map(FIELDS.index, ("groups", "step", "weight_amax"))


class StepScalars(NamedTuple):
    """The step that each of T parameters takes: its number, FP32 (T,), and `step_coefficients`, FP32 (T, 3)."""

    steps: Tensor
    coefficients: Tensor


class Table:
    """The device table of T parameters, rows int64 (T, FIELDS): counts their steps, and skips some of them."""

    def __init__(self, rows: Tensor, device: torch.device) -> None:
        self.device, self.tensors = device, len(rows)
        self.rows = rows.to(device)
        self.steps = torch.empty(self.tensors, dtype=torch.float32, device=device)
        self.never = torch.zeros((), dtype=torch.bool, device=device)
        self.always = torch.ones((), dtype=torch.bool, device=device)
        self.skipped_rows: Optional[Tensor] = None  # made when first needed

    @classmethod
    def of_counters(cls, counters: List[Tensor]) -> Table:
        """Of step counters alone, 0-d FP32 tensors that lie anywhere on one device."""
        rows = torch.zeros(len(counters), len(FIELDS), dtype=torch.int64)
        rows[:, _STEP] = torch.tensor(list(map(Tensor.data_ptr, counters)))
        return cls(rows, counters[0].device)

    def skipping(self, skip: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, one flag) that stand for `skip`, 0-d or (T,)."""
        if not skip.dim():
            return self.rows, skip
        if self.skipped_rows is None:
            self.dummy_step = torch.zeros((), device=self.device)
            self.skipped_rows = self.rows.clone()
            self.skipped_rows[:, _GROUPS] = 0
            self.skipped_rows[:, _STEP] = self.dummy_step.data_ptr()
            self.skipped_rows[:, _WEIGHT_AMAX] = 0
        return torch.where(skip.unsqueeze(1), self.skipped_rows, self.rows), self.never

    def clear_weight_amax(self, rows: Tensor, skip: Tensor) -> None:
        """Set the maxima of the weights to 0 unless skipped (0-d)."""
        clear_weight_amax_kernel[(cdiv(self.tensors, COUNTERS),)](rows, skip, self.tensors, len(FIELDS), COUNTERS)

    def count(self, rows: Tensor, skip: Tensor) -> Tensor:
        """Increment every counter unless skipped (0-d); returns all, FP32 (T,), valid until the next call."""
        count_steps_kernel[(cdiv(self.tensors, COUNTERS),)](rows, self.steps, skip, self.tensors, len(FIELDS), COUNTERS)
        return self.steps

    def count_step(self, skip: Tensor) -> None:
        """Count the step of every parameter; skip 0-d or (T,)."""
        with on_device(self.device):
            self.count(*self.skipping(skip))

    def take_step(self, lr: Tensor, skip: Tensor, hyper: Hyper) -> StepScalars:
        """The same, and return what the step needs."""
        with on_device(self.device):
            return scalars_of(self.count(*self.skipping(skip)), lr, hyper)

    def next_step(self, lr: Tensor, hyper: Hyper) -> StepScalars:
        """What `take_step` will return, without counting."""
        with on_device(self.device):
            return scalars_of(self.count(self.rows, self.always) + 1.0, lr, hyper)


def scalars_of(steps: Tensor, lr: Tensor, hyper: Hyper) -> StepScalars:
    return StepScalars(steps, step_coefficients(steps, lr, *hyper[:4]))


class NextStepPart(NamedTuple):
    """The rows of a `NextStep` that belong to one owner's T parameters, for the kernels to read and write."""

    scalars: StepScalars
    sums: Sums
    skip: Tensor  # bool (T,), or 0-d if T is 1: as the step wants it


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
        self.counters: List[Tensor] = []
        rows: dict[Any, slice] = {}
        dummy_step = torch.zeros((), device=device)
        for owner, own in counters.items():
            rows[owner] = slice(len(self.counters), len(self.counters) + len(own))
            self.counters += [*own, *[dummy_step] * (-len(own) % 16)]
        self.addresses = list(map(Tensor.data_ptr, self.counters))
        self.table = Table.of_counters(self.counters)
        count = len(self.counters)
        self.steps = torch.zeros(count, device=device)
        self.squares = torch.zeros(count, dtype=torch.float64, device=device)
        self.coefficients = torch.zeros(count, 3, device=device)
        self.skips = torch.ones(count, dtype=torch.bool, device=device)
        self.parts = {owner: self._part(of) for owner, of in rows.items()}

    def _part(self, rows: slice) -> NextStepPart:
        skips = self.skips[rows]
        scalars, sums = StepScalars(self.steps[rows], self.coefficients[rows]), Sums(self.squares[rows], skips)
        return NextStepPart(scalars, sums, skips.view(()) if len(skips) == 1 else skips)

    def compute(self, lr: Tensor, hyper: Hyper) -> None:
        """Compute numbers and coefficients of the coming step, unless counters have moved."""
        self.is_current = list(map(Tensor.data_ptr, self.counters)) == self.addresses
        if self.is_current:
            scalars = self.table.next_step(lr, hyper)
            self.steps.copy_(scalars.steps)
            self.coefficients.copy_(scalars.coefficients)

    def take(self, part: NextStepPart, skip: Tensor) -> Tensor:
        """Record that the step of a part is taken, unless skip; returns skip as the step wants it, (T,) or 0-d."""
        self.taken = True
        if skip is not part.sums.skips:
            part.sums.skips.copy_(skip)
        return part.skip

    def count(self) -> None:
        """Write the counts of the steps that have been taken and not been counted."""
        if self.taken:
            self.table.count_step(self.skips)
            self.skips.fill_(True)
            self.taken = False
