"""How large attention's scores get, layer by layer: what to watch before a training becomes unstable.

    with overcoat.record_scores(model) as scores:
        model(**batch)
    print(scores)

Recorded is each layer's largest log-sum-exp: a query's lies between its largest score and that plus the logarithm of
the number of keys. Overcoat's gradients are as good as those with attention in BF16 at every score up to 3e4
(tests/models/test_scores.py). But BF16 rounds q and k to 8 bits: once scores pass a few hundred, it moves them by more
than one, whatever the recipe. A figure that grows from evaluation to evaluation wants a lower learning rate, a q/k norm
or a clip of the logits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor, nn

from overcoat.block.softmax import observers
from overcoat.models.decoder import Fp8DecoderLayer


class Scores:
    """The largest log-sum-exp of each converted layer that ran; reading it waits for the device.

    names: of the model's converted layers, by the layer's `id`.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names
        self._layer: Optional[str] = None  # whose forward runs now; a recomputed block's does not count
        self._seen: list[tuple[str, Tensor]] = []

    def enter(self, layer: Optional[nn.Module]) -> None:
        """The layer whose forward begins; None where it ends."""
        self._layer = self.names.get(id(layer))

    def note(self, lse: Tensor) -> None:
        """Note the running layer's log-sum-exp."""
        if self._layer is not None:
            self._seen.append((self._layer, lse.detach().amax()))

    @property
    def by_layer(self) -> dict[str, float]:
        """Over all forward passes, by the layer's name; NaN if one was. Empty if none ran in `train()` mode."""
        if not self._seen:
            return {}
        found: dict[str, float] = {}
        values = torch.stack([value for _, value in self._seen]).tolist()
        for (name, _), value in zip(self._seen, values, strict=True):
            found[name] = max(found.get(name, value), value, key=_by_size)
        return found

    @property
    def largest(self) -> tuple[str, float]:
        """The layer with the largest one, and that, NaN before all; ("", -inf) if none ran."""
        return max(self.by_layer.items(), key=lambda item: _by_size(item[1]), default=("", -math.inf))

    def __str__(self) -> str:
        return "\n".join(f"{name}  {value:.1f}" for name, value in self.by_layer.items())


def _by_size(value: float) -> float:
    return math.inf if math.isnan(value) else value


@contextlib.contextmanager
def record_scores(model: nn.Module) -> Iterator[Scores]:
    """Record the log-sum-exp of every converted layer that runs in `train()` mode inside; compiled layers are not seen.

    Costs one reduction a layer and no wait for the device. Blocks that a backward recomputes are not counted again.
    """
    scores = Scores({id(m): name for name, m in model.named_modules() if isinstance(m, Fp8DecoderLayer)})
    observers.append(scores)
    try:
        yield scores
    finally:
        observers.remove(scores)
