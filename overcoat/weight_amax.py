"""max |w| of weights, found by AdamW as it writes them, so that no forward has to look for it.

A forward asks for the maxima of its weights (`predict`), which AdamW finds from then on in the pass that it makes
anyway. Unknown ones the forward finds itself and reports (`observe`): they serve until the next step of any optimizer,
those of frozen weights (a base under LoRA) until the weight changes.

What the forward gets is a prediction: a version counter tells that a weight has changed, but not through `weight.data`,
which is how weights are averaged, clipped or loaded. So the op that takes it (`stack_weights_predicted`) finds the true
maximum on its way and quantizes again if the two differ: only time depends on what is recorded here.

AdamW finds the maxima of parameters that it steps in one piece, not with offloaded states; of FSDP2's shards where
these travel in FP8 (models/gather.py). Elsewhere, and with other optimizers, the first forward of a step looks, and the
other micro-batches and what is recomputed do not.
torch.compile's code asks when it runs, by an op (`stack_weights_tracked`), and reports nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class Observed(NamedTuple):
    """What a forward has found: max |w| of a weight or of all that are stacked with it, 0-d FP32, and when."""

    steps: int
    version: int
    amax: Tensor


class Tracked:
    """A weight whose maximum is wanted.

    Attributes:
        amax: max |w| at `version`, 0-d FP32, always the same memory: kernels and CUDA graphs know its address.
        version: the weight's version counter when AdamW found it; None: never.
        observed: what a forward found.
    """

    def __init__(self, weight: Tensor) -> None:
        key = id(weight)
        self.weight = weakref.ref(weight, lambda _: _tracked.pop(key, None))
        self.amax: Optional[Tensor] = None
        self.version: Optional[int] = None
        self.observed: Optional[Observed] = None

    def known(self, weight: Tensor) -> Optional[Tensor]:
        """What is known of the weight as it is now."""
        if self.amax is not None and (self.version, self.amax.device) == (weight._version, weight.device):
            return self.amax
        observed = self.observed
        if observed is None or observed.version != weight._version or observed.amax.device != weight.device:
            return None
        if weight.requires_grad and observed.steps != _steps[0]:
            return None
        # A graph would read it again when it is gone.
        return None if _capturing(weight) else observed.amax


def memory(entries: Sequence[Tracked], device: torch.device) -> list[Tensor]:
    """Where the maxima of these weights, which lie on `device`, are to be written."""
    new = [entry for entry in entries if entry.amax is None or entry.amax.device != device]
    # Each at a multiple of 16 bytes, as launches of kernels are remembered for such addresses (kernels/launch.py).
    for entry, place in zip(new, torch.zeros(len(new), 4, device=device), strict=True):
        entry.amax, entry.version = place[0], None
    return [entry.amax for entry in entries if entry.amax is not None]


_tracked: dict[int, Tracked] = {}  # by the weight's id
_count = [0]
_steps = [0]  # of all optimizers: FSDP2's parameters change with every step, their version counters do not


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _count_step(*_: Any) -> None:
    _steps[0] += 1


register_optimizer_step_post_hook(_count_step)


def count() -> int:
    """How many weights have ever been tracked: while it is the same, so is what `tracked` returns."""
    return _count[0]


def track(weight: Tensor) -> Tracked:
    """Have AdamW find the maximum of a weight, or of a sharded one's local tensor; its entry."""
    entry = tracked(weight)
    if entry is None:
        entry = _tracked[id(weight)] = Tracked(weight)
        _count[0] += 1
    return entry


def tracked(weight: Tensor) -> Optional[Tracked]:
    """The entry of a weight whose maximum is wanted."""
    found = _tracked.get(id(weight))
    return found if found is not None and found.weight() is weight else None


def predict(weights: Sequence[Tensor]) -> Optional[list[Tensor]]:
    """What the maxima of these weights should be, 0-d FP32 each; None unless known of all of them.

    From now on AdamW finds those that it steps. Only leaves are tracked: others are made anew in each forward.
    """
    found: list[Tensor] = []
    for weight in weights:
        entry = tracked(weight)
        if entry is None:
            if weight.is_leaf and not weight.is_inference():
                track(weight)
        elif (amax := entry.known(weight)) is not None:
            found.append(amax)
    return found if len(found) == len(weights) else None


def observe(weights: Sequence[Tensor], amax: Tensor) -> None:
    """A forward has found `amax`, the maximum of all these weights."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or amax.is_meta or _capturing(amax):
        return
    for entry, weight in ((tracked(weight), weight) for weight in weights):
        if entry is not None:
            entry.observed = Observed(_steps[0], weight._version, amax)
