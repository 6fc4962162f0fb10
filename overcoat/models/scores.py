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
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from overcoat.block import attention
from overcoat.models.decoder import Fp8DecoderLayer


class Scores:
    """The largest log-sum-exp of each converted layer that ran; reading it waits for the device.

    names: of the model's converted layers.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._seen: list[Tensor] = []

    def __call__(self, lse: Tensor) -> None:
        """Note one layer's log-sum-exp, in the order in which layers run."""
        self._seen.append(lse.detach().amax())

    @property
    def by_layer(self) -> dict[str, float]:
        """Over all forward passes, by the layer's name; empty if no converted layer ran in `train()` mode."""
        if not self._seen:
            return {}
        found: dict[str, float] = {}
        for place, value in enumerate(torch.stack(self._seen).tolist()):
            name = self.names[place % len(self.names)]
            found[name] = max(found.get(name, value), value)
        return found

    @property
    def largest(self) -> tuple[str, float]:
        """The layer with the largest one, and that; ("", -inf) if none ran."""
        return max(self.by_layer.items(), key=lambda item: item[1], default=("", float("-inf")))

    def __str__(self) -> str:
        return "\n".join(f"{name}  {value:.1f}" for name, value in self.by_layer.items())


@contextlib.contextmanager
def record_scores(model: nn.Module) -> Iterator[Scores]:
    """Record the log-sum-exp of every converted layer that runs in `train()` mode inside; compiled layers are not seen.

    Costs one reduction a layer and no wait for the device. A backward inside that recomputes blocks counts them again,
    which changes no maximum.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, Fp8DecoderLayer)]
    scores = Scores(names)
    attention.observers.append(scores)
    try:
        yield scores
    finally:
        attention.observers.remove(scores)
