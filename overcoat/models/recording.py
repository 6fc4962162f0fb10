"""Record attention's scores and the use of FP8 operands' range while layers run.

    with overcoat.record_scores(model) as scores:
        model(**batch)
    print(scores)

    with overcoat.record_ranges(model) as ranges:
        model(**batch).loss.backward()
    ranges.by_layer["model.layers.0"]["q_proj k_proj v_proj"]["gradient"].zero

Scores: each layer's largest log-sum-exp; a query's lies between its largest score and that plus the logarithm of the
number of keys. Overcoat's gradients are as good as those with attention in BF16 at every score up to 3e4
(tests/models/test_scores.py). But BF16 rounds q and k to 8 bits: once scores pass a few hundred, it moves them by more
than one, whatever the recipe. A figure that grows from evaluation to evaluation wants a lower learning rate, a q/k norm
or a clip of the logits.

Ranges: the operands as the products read them, each (stacked) linear layer's input, weight and output gradient. A scale
is found just in time: a few saturated codes are normal; many mean clipping. Zeros are values that underflowed; rows
that are zero from end to end (gradients of tokens without labels) are left out, the negative half of a ReLU is not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.block.attention import observers
from overcoat.block.linear import watchers
from overcoat.models.decoder import Fp8DecoderLayer

# Magnitude bits of the largest finite number.
TOPS = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
CHUNK = 1 << 24  # codes counted at once: what is looked at is as large as a step's largest tensors


class Recorded:
    """Records of a model's converted layers; reading syncs with the device. `names`: of the layers, by `id`."""

    def __init__(self, model: Optional[nn.Module] = None) -> None:
        layers = model.named_modules() if model is not None else ()
        self.names = {id(layer): name for name, layer in layers if isinstance(layer, Fp8DecoderLayer)}
        self._seen: list[Any] = []

    def enter(self, layer: Optional[nn.Module]) -> None:
        """Take the layer whose forward begins; None where it ends."""

    def note(self, lse: Tensor) -> None:
        """Take the running layer's log-sum-exp."""


class Scores(Recorded):
    """The largest log-sum-exp of each converted layer that ran."""

    _layer: Optional[str] = None  # whose forward runs now; a recomputed block's does not count

    def enter(self, layer: Optional[nn.Module]) -> None:
        self._layer = self.names.get(id(layer))

    def note(self, lse: Tensor) -> None:
        if self._layer is not None:
            self._seen.append((self._layer, lse.detach().amax()))

    @property
    def by_layer(self) -> dict[str, float]:
        """Return the maximum over all forward passes by the layer's name, NaN if one was; {} if none trained."""
        found: dict[str, float] = {}
        values = torch.stack([value for _, value in self._seen]).tolist() if self._seen else []
        for (name, _), value in zip(self._seen, values, strict=True):
            found[name] = max(found.get(name, value), value, key=_by_size)
        return found

    @property
    def largest(self) -> tuple[str, float]:
        """Return the layer with the largest log-sum-exp, and that; NaN counts as largest; ("", -inf) if none ran."""
        return max(self.by_layer.items(), key=lambda item: _by_size(item[1]), default=("", -math.inf))

    def __str__(self) -> str:
        return "\n".join(f"{name}  {value:.1f}" for name, value in self.by_layer.items())


def _by_size(value: float) -> float:
    return math.inf if math.isnan(value) else value


class Range(NamedTuple):
    """Shares of codes that are the largest number, and zero, in rows that are not zero from end to end; the largest
    value that the scale (the largest of the scales) lets the format hold."""

    saturated: float
    zero: float
    limit: float


class Ranges(Recorded):
    """The operands of the converted layers that ran."""

    def __init__(self, model: Optional[nn.Module] = None) -> None:
        super().__init__(model)
        self._weights: dict[int, tuple[str, str]] = {}  # layer and name of a weight, by `id`

    def enter(self, layer: Optional[nn.Module]) -> None:
        # With its weights as they are then: FSDP's are gathered.
        if (name := self.names.get(id(layer))) is not None and layer is not None:
            for path, weight in layer.named_parameters():
                self._weights[id(weight)] = (name, path.removesuffix(".weight").rpartition(".")[2])

    def saw(self, kind: str, weights: tuple[Any, ...], codes: Tensor, scale: Tensor) -> None:
        """Record an operand of the GEMM with these weights; kind: "input", "weight" or "gradient"."""
        known = [self._weights[id(weight)] for weight in weights if id(weight) in self._weights]
        if known:
            counts = torch.zeros(3, dtype=torch.int64, device=codes.device)
            for part in codes.view(torch.uint8).flatten(0, -2).split(max(1, CHUNK // codes.shape[-1])):
                part = part & 0x7F
                zero = (part == 0).sum(1)
                used = zero < part.shape[1]
                counts += torch.stack(((part == TOPS[codes.dtype]).sum(), (zero * used).sum(), used.sum()))
            limit = scale.detach().amax() * torch.finfo(codes.dtype).max
            found = torch.cat((counts.double(), limit.double()[None]))
            self._seen.append((known[0][0], " ".join(name for _, name in known), kind, codes.shape[-1], found))

    @property
    def by_layer(self) -> dict[str, dict[str, dict[str, Range]]]:
        """Return ranges by layer, names of the stacked linear layers, and operand: "input", "weight", "gradient"."""
        found: dict[str, dict[str, dict[str, Range]]] = {}
        values = torch.stack([each[-1] for each in self._seen]).tolist() if self._seen else []
        for (layer, product, kind, columns, _), (top, zero, rows, limit) in zip(self._seen, values, strict=True):
            size = max(1, rows * columns)
            found.setdefault(layer, {}).setdefault(product, {})[kind] = Range(top / size, zero / size, limit)
        return found


@contextlib.contextmanager
def record_scores(model: nn.Module) -> Iterator[Scores]:
    """Record the log-sum-exp of every converted layer that runs in `train()` mode inside; compiled layers are not seen.

    Costs one reduction a layer and no wait for the device. Blocks that a backward recomputes are not counted again.
    """
    observers.append(scores := Scores(model))
    try:
        yield scores
    finally:
        observers.remove(scores)


@contextlib.contextmanager
def record_ranges(model: nn.Module) -> Iterator[Ranges]:
    """Record the FP8 operands of every converted layer that runs inside, forward and backward: those of the
    last pass. Compiled layers are not seen. Costs a pass over each operand, and no host sync."""
    ranges = Ranges(model)
    observers.append(ranges)
    watchers.append(ranges)
    try:
        yield ranges
    finally:
        observers.remove(ranges)
        watchers.remove(ranges)
