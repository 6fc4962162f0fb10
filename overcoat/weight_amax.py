"""max |w| of weights, found by AdamW as it writes them, so that no forward has to look for it.

    forward     asks for the maxima of its weights (`guesses`): what a step has found since, or None
    AdamW       finds, in the pass that it makes anyway, the maximum of every weight that was `asked` for

What is handed to the forward is a guess. A version counter tells that a weight has changed, but not if that happened
through `weight.data`, and weights that are averaged, clipped or loaded that way are many; so the op that takes the
guess (`stack_weights_guessed`) finds the true maximum on its way and starts again if the two differ. Nothing but time
depends on what is noted here.

Only parameters that overcoat.AdamW steps in one piece have one. Under FSDP2 it steps shards, whose maxima would have to
be exchanged; offloaded states pass by in pieces; other optimizers find no maxima; torch.compile's graphs cannot ask.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor


class Asked:
    """A weight whose maximum is wanted.

    Attributes:
        amax: max |w| at `version`, 0-d FP32, always the same memory: kernels and CUDA graphs know its address.
        version: the weight's version counter when it was found; None: never.
    """

    def __init__(self, weight: Tensor) -> None:
        key = id(weight)
        self.weight = weakref.ref(weight, lambda _: _asked.pop(key, None))
        self.amax: Optional[Tensor] = None
        self.version: Optional[int] = None


def memory(entries: Sequence[Asked], device: torch.device) -> list[Tensor]:
    """Where the maxima of these weights, which lie on `device`, are to be written."""
    new = [entry for entry in entries if entry.amax is None or entry.amax.device != device]
    # Each at a multiple of 16 bytes, as launches of kernels are remembered for such addresses (kernels/gpu/launch.py).
    for entry, place in zip(new, torch.zeros(len(new), 4, device=device), strict=True):
        entry.amax, entry.version = place[0], None
    return [entry.amax for entry in entries if entry.amax is not None]


_asked: dict[int, Asked] = {}  # by the weight's id
_count = [0]


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
    if torch.compiler.is_compiling():
        return None
    found: list[Tensor] = []
    for weight in weights:
        entry = asked(weight)
        if entry is None:
            if weight.requires_grad and weight.is_leaf:
                _asked[id(weight)] = Asked(weight)
                _count[0] += 1
        elif entry.amax is not None and entry.version == weight._version and entry.amax.device == weight.device:
            found.append(entry.amax)
    return found if len(found) == len(weights) else None
