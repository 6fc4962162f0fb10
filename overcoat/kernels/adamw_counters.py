"""Step counts on the device: every parameter counts its own steps, without the host waiting.

A parameter's count is a 0-d tensor of its state; `Counters` has the addresses of all. A step needs its number and
`step_coefficients`.

Legend: T tensors.
"""

from __future__ import annotations

from typing import List, NamedTuple

import torch
from torch import Tensor

from overcoat.kernels.adamw import Hyper, step_coefficients
from overcoat.kernels.language import tl
from overcoat.kernels.launch import cdiv, kernel

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
        steps = self.count_step(skip)
        return StepScalars(steps, step_coefficients(steps, lr, *hyper[:4]))
