"""The phases of a real step, measured: the same boundaries as the prediction's.

On a GPU the caching allocator is asked at each boundary: what is allocated, and the most since the last one. On a CPU,
whose allocator keeps no such account, a `Meter` counts the tensors of the same step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from overcoat.block.offload import transfers
from overcoat.estimate.meter import Meter, aligned
from overcoat.estimate.phases import EMBEDDING, OPTIMIZER, watch
from overcoat.estimate.predict import Phase
from overcoat.optim.sharding import local

END = "end"


def restart_peak(device: torch.device) -> int:
    """Most bytes allocated on a GPU since the last call."""
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


class _Allocator:
    """Phases by a GPU's allocator."""

    def __init__(self, device: torch.device, restart: Callable[[torch.device], int]) -> None:
        self.device, self.restart = device, restart
        self.label = ""
        self.phases: list[Phase] = []
        restart(device)

    def mark(self, label: str) -> None:
        if self.label:
            self.phases.append(Phase(self.label, self.restart(self.device), torch.cuda.memory_allocated(self.device)))
        else:
            self.restart(self.device)
        self.label = label


@contextlib.contextmanager
def measure_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    restart: Callable[[torch.device], int] = restart_peak,
) -> Iterator[list[Phase]]:
    """Measure the training step taken inside: forward, backward and `optimizer.step()`.

    Args:
        model: a transformers causal model. optimizer: of its parameters; offloaded states are not on the device.
        restart: begins a new peak and returns the old one, for who keeps the account of a whole run.

    Yields:
        the step's phases in order, filled when the block ends; of several micro-batches those of the last.
    """
    device = next(model.parameters()).device
    phases: list[Phase] = []
    if device.type == "cuda":
        allocator = _Allocator(device, restart)
        with _boundaries(model, optimizer, allocator.mark):
            yield phases
        allocator.mark(END)
        phases += allocator.phases
    else:
        there = [*model.parameters(), *model.buffers(), *_states(optimizer)]
        there += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        there = list(map(local, there))
        sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in there}
        base = sum(map(aligned, sizes.values()))
        meter = Meter()
        meter.leave_out(there)
        buffers = [buffer.memory for buffer in transfers(device).pool.buffers]
        meter.leave_out(memory for memory in buffers if memory is not None)
        with _boundaries(model, optimizer, meter.mark), meter.watch_resizes(), meter:
            yield phases
        meter.mark(END)
        meter.stop()
        account = meter.account(["all"] * meter.count)
        phases += [Phase(label, base + peak, base + end) for label, peak, end in account.phases() if label != END]
    del phases[: _last_forward(phases)]


@contextlib.contextmanager
def _boundaries(model: nn.Module, optimizer: torch.optim.Optimizer, mark: Callable[[str], None]) -> Iterator[None]:
    handle = optimizer.register_step_pre_hook(lambda *_: mark(OPTIMIZER))
    try:
        with watch(model, mark):
            yield
    finally:
        handle.remove()


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]


def _last_forward(phases: list[Phase]) -> int:
    return max((index for index, phase in enumerate(phases) if phase.label == EMBEDDING), default=0)
