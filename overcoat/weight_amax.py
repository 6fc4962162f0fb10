"""max |w| of weights, found by AdamW as it writes them, so that no forward has to look for it.

    forward     asks for the maxima of its weights (`guesses`): what is known of them, or None; then it looks for the
                maximum itself and says so (`note`), which serves until the next step of any optimizer
    AdamW       finds, in the pass that it makes anyway, the maximum of every weight that was `asked` for

What is handed to the forward is a guess. A version counter tells that a weight has changed, but not if that happened
through `weight.data`, and weights that are averaged, clipped or loaded that way are many; so the op that takes the
guess (`stack_weights_guessed`) finds the true maximum on its way and starts again if the two differ. Nothing but time
depends on what is noted here.

AdamW finds those of parameters that it steps in one piece. Under FSDP2 it steps shards, whose maxima would have to be
exchanged; offloaded states pass by in pieces; other optimizers find none. There the first forward of a step looks, and
the other micro-batches and what is recomputed go without. torch.compile's code asks when it runs, by an op
(`stack_weights_asking`), and notes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class Noted(NamedTuple):
    """What a forward has found: max |w| of a weight or of all that are stacked with it, 0-d FP32, and when."""

    steps: int
    version: int
    amax: Tensor


class Asked:
    """A weight whose maximum is wanted.

    Attributes:
        amax: max |w| at `version`, 0-d FP32, always the same memory: kernels and CUDA graphs know its address.
        version: the weight's version counter when it was found; None: never.
        noted: what a forward found.
    """

    def __init__(self, weight: Tensor) -> None:
        key = id(weight)
        self.weight = weakref.ref(weight, lambda _: _asked.pop(key, None))
        self.amax: Optional[Tensor] = None
        self.version: Optional[int] = None
        self.noted: Optional[Noted] = None

    def known(self, weight: Tensor) -> Optional[Tensor]:
        """What is known of the weight as it is now."""
        if self.amax is not None and (self.version, self.amax.device) == (weight._version, weight.device):
            return self.amax
        noted = self.noted
        if noted is None or noted[:2] != (_steps[0], weight._version) or noted.amax.device != weight.device:
            return None
        # A graph would read it again when it is gone.
        return None if _capturing(weight) else noted.amax


def memory(entries: Sequence[Asked], device: torch.device) -> list[Tensor]:
    """Where the maxima of these weights, which lie on `device`, are to be written."""
    new = [entry for entry in entries if entry.amax is None or entry.amax.device != device]
    # Each at a multiple of 16 bytes, as launches of kernels are remembered for such addresses (kernels/gpu/launch.py).
    for entry, place in zip(new, torch.zeros(len(new), 4, device=device), strict=True):
        entry.amax, entry.version = place[0], None
    return [entry.amax for entry in entries if entry.amax is not None]


_asked: dict[int, Asked] = {}  # by the weight's id
_count = [0]
_steps = [0]  # of all optimizers: FSDP2's parameters change with every step, their version counters do not


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _count_step(*_: Any) -> None:
    _steps[0] += 1


register_optimizer_step_post_hook(_count_step)


def count() -> int:
    """How many weights have been asked for, ever: while it is the same, so is what `asked` returns."""
    return _count[0]


def asked(weight: Tensor) -> Optional[Asked]:
    """The entry of a weight whose maximum was asked for."""
    found = _asked.get(id(weight))
    return found if found is not None and found.weight() is weight else None


def guesses(weights: Sequence[Tensor]) -> Optional[list[Tensor]]:
    """What the maxima of these weights should be, 0-d FP32 each; None unless known of all of them.

    From now on AdamW finds them. Only leaves that want gradients are asked for: an optimizer steps no others.
    """
    found: list[Tensor] = []
    for weight in weights:
        entry = asked(weight)
        if entry is None:
            if weight.requires_grad and weight.is_leaf and not weight.is_inference():
                _asked[id(weight)] = Asked(weight)
                _count[0] += 1
        elif (amax := entry.known(weight)) is not None:
            found.append(amax)
    return found if len(found) == len(weights) else None


def note(weights: Sequence[Tensor], amax: Tensor) -> None:
    """The maximum of all these weights was looked for, and found to be `amax`."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or amax.is_meta or _capturing(amax):
        return
    for entry, weight in ((asked(weight), weight) for weight in weights):
        if entry is not None:
            entry.noted = Noted(_steps[0], weight._version, amax)
