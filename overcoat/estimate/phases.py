"""Split a training step into phases, by hooks on a transformers model; used for prediction and measurement.

    embedding | block 1 forward ... block L forward | final norm | loss |
    loss backward | block L backward ... block 1 backward | embedding backward | optimizer

A vision tower's blocks come between embedding and block 1, and the connector after them; likewise backward. In real
steps memory is read at each boundary from a GPU's caching allocator; on a CPU a `Meter` counts the tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overcoat.block.offload import transfers
from overcoat.estimate.meter import Meter
from overcoat.estimate.workspaces import aligned
from overcoat.memory import restart_peak
from overcoat.models.family import decoder_layers, find_causal_model, model_spec_of
from overcoat.optim.sharding import local

EMBEDDING, NORM, LOSS = "embedding", "final norm", "loss"
LOSS_BACKWARD, EMBEDDING_BACKWARD, OPTIMIZER = "loss backward", "embedding backward", "optimizer"
# After a tower's blocks, and in its backward after them.
CONNECTOR, PATCHES_BACKWARD = "connector", "patch embedding backward"


class Phase(NamedTuple):
    """A phase of a step: the most bytes allocated in it, and those at its end."""

    label: str
    peak: int
    end: int


def kind_of(label: str) -> str:
    """Return "forward", "loss", "backward" or "optimizer"."""
    if label in (LOSS, LOSS_BACKWARD):
        return "loss"
    if label == OPTIMIZER:
        return "optimizer"
    return "backward" if label.endswith("backward") else "forward"


@contextlib.contextmanager
def watch(
    model: nn.Module,
    mark: Callable[[str], None],
    flowing: Callable[[Tensor], None] = lambda _: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Iterator[None]:
    """Call `mark(label)` at the beginning of each phase of a step; of the optimizer's too if it is given.

    Args:
        model: a transformers causal model; its blocks are numbered from 1.
        flowing: called with the residual stream, and with its gradient, between blocks.
    """
    found = find_causal_model(model)
    if found is None:
        raise ValueError(f"{type(model).__name__} is not a causal language model of transformers (a *ForCausalLM)")
    causal: Any = found[1]
    whole = model_spec_of(causal)
    vision = f"{whole.vision}." if whole is not None and whole.vision else None
    towers: list[Any] = []
    blocks: list[Any] = []
    for name, layer in decoder_layers(causal).items():
        (towers if vision is not None and name.startswith(vision) else blocks).append(layer)

    def passes(x: Tensor, label: str) -> None:
        def hook(gradient: Tensor) -> None:
            mark(label)
            flowing(gradient)

        flowing(x)
        if x.requires_grad:
            x.register_hook(hook)

    def watch_stack(layers: list[Any], title: str, before_all: str, after_all: str) -> None:
        def before(index: int, args: tuple[Any, ...]) -> None:
            if index == 1 and args and args[0].requires_grad:
                passes(args[0], before_all)
            mark(f"{title} {index} forward")

        def after(index: int, output: Any) -> None:
            x = output[0] if isinstance(output, tuple) else output  # Falcon returns its attention weights as well
            passes(x, f"{title} {index} backward")
            if index == len(layers):
                mark(after_all)

        for index, layer in enumerate(layers, 1):
            handles.append(layer.register_forward_pre_hook(lambda _, args, index=index: before(index, args)))
            handles.append(layer.register_forward_hook(lambda _, args, output, index=index: after(index, output)))

    def after_loss(_module: nn.Module, _args: Any, output: Any) -> None:
        if output[0].requires_grad:  # the loss, or the logits where there is none
            output[0].register_hook(lambda _: mark(LOSS_BACKWARD))

    handles = [
        causal.register_forward_pre_hook(lambda *_: mark(EMBEDDING)),
        causal.base_model.register_forward_hook(lambda *_: mark(LOSS)),
        causal.register_forward_hook(after_loss),
    ]
    if optimizer is not None:
        handles.append(optimizer.register_step_pre_hook(lambda *_: mark(OPTIMIZER)))
    watch_stack(towers, "tower block", PATCHES_BACKWARD, CONNECTOR)
    watch_stack(blocks, "block", EMBEDDING_BACKWARD, NORM)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- a real step --------------------------------------------------------------------------------------------------


class Allocator:
    """Measures phases with a GPU's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.label, self.phases = device, "", list[Phase]()
        restart_peak(device)

    def mark(self, label: str) -> None:
        peak = restart_peak(self.device)
        if self.label:
            self.phases.append(Phase(self.label, peak, torch.cuda.memory_allocated(self.device)))
        self.label = label


@contextlib.contextmanager
def measure_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[list[Phase]]:
    """Measure the training step taken inside: forward, backward and `optimizer.step()` of a transformers causal model.

    Yields:
        the step's phases in order, filled when the block ends; of several micro-batches those of the last.
    """
    device = next(model.parameters()).device
    phases: list[Phase] = []
    if device.type == "cuda":
        allocator = Allocator(device)
        with watch(model, allocator.mark, optimizer=optimizer):
            yield phases
        allocator.mark("end")
        phases += allocator.phases
    else:
        there = _tensors(model, optimizer)
        sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in there}
        base = sum(map(aligned, sizes.values()))
        meter = Meter()
        on_host = [buffer.memory for buffer in transfers(device).pool.buffers if buffer.memory is not None]
        meter.leave_out([*there, *on_host])
        with watch(model, meter.mark, optimizer=optimizer), meter.watch_resizes(), meter:
            yield phases
        meter.mark("end")
        meter.stop()
        found = meter.account(["all"] * meter.count)[:-1]
        phases += [Phase(label, base + sum(fullest.values()), base + end) for label, fullest, end in found]
    del phases[: max((index for index, phase in enumerate(phases) if phase.label == EMBEDDING), default=0)]


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that exist before a step, this process' part of each."""
    there: list[Any] = [*model.parameters(), *model.buffers()]
    there += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    there += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return list(map(local, there))
