"""How well the FP8 operands of a step's products use their range, layer by layer.

    with overcoat.record_ranges(model) as ranges:
        model(**batch).loss.backward()
    ranges.by_layer["model.layers.0"]["q_proj k_proj v_proj"]["gradient"].zero

Recorded are the operands as the products read them: each (stacked) linear layer's input, weight and output gradient. A
scale is found just in time, so a few codes always are the largest one; many of them mean values that were cut off.
Zeros are what underflowed, and what was zero before: rows without labels, the negative half of a ReLU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from overcoat.block.linear import watchers
from overcoat.block.softmax import observers
from overcoat.models.decoder import Fp8DecoderLayer

# Magnitude bits of the largest finite number.
TOPS = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
CHUNK = 1 << 24  # codes counted at once: what is looked at is as large as a step's largest tensors


class Range(NamedTuple):
    """Shares of codes that are the largest number, and zero; the largest value that the scale (the largest of the
    scales) lets the format hold."""

    saturated: float
    zero: float
    limit: float


class Ranges:
    """The operands of the converted layers that ran; reading them waits for the device."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names  # of converted layers, by `id`
        self._weights: dict[int, tuple[str, str]] = {}  # layer and name of a weight, by `id`
        self._seen: list[tuple[str, str, str, int, Tensor]] = []

    def enter(self, layer: Optional[nn.Module]) -> None:
        """The layer whose forward begins, with its weights as they are then: FSDP's are gathered."""
        if (name := self.names.get(id(layer))) is not None and layer is not None:
            for path, weight in layer.named_parameters():
                self._weights[id(weight)] = (name, path.removesuffix(".weight").rpartition(".")[2])

    def note(self, lse: Tensor) -> None:
        """Attention's log-sum-exp, of which nothing is asked here."""

    def saw(self, kind: str, weights: tuple[Any, ...], codes: Tensor, scale: Tensor) -> None:
        """An operand of the product with these weights."""
        known = [self._weights[id(weight)] for weight in weights if id(weight) in self._weights]
        if known:
            counts = torch.zeros(2, dtype=torch.int64, device=codes.device)
            for part in codes.view(torch.uint8).flatten().split(CHUNK):
                part = part & 0x7F
                counts += torch.stack(((part == TOPS[codes.dtype]).sum(), (part == 0).sum()))
            limit = scale.detach().amax() * torch.finfo(codes.dtype).max
            found = torch.cat((counts.double(), limit.double()[None]))
            self._seen.append((known[0][0], " ".join(name for _, name in known), kind, codes.numel(), found))

    @property
    def by_layer(self) -> dict[str, dict[str, dict[str, Range]]]:
        """By layer, names of the stacked linear layers, and operand: "input", "weight", "gradient"."""
        found: dict[str, dict[str, dict[str, Range]]] = {}
        values = torch.stack([each[-1] for each in self._seen]).tolist() if self._seen else []
        for (layer, product, kind, size, _), (top, zero, limit) in zip(self._seen, values, strict=True):
            found.setdefault(layer, {}).setdefault(product, {})[kind] = Range(top / size, zero / size, limit)
        return found


@contextlib.contextmanager
def record_ranges(model: nn.Module) -> Iterator[Ranges]:
    """Record the FP8 operands of every converted layer that runs inside, forward and backward; of several passes the
    last one's. Compiled layers are not seen. Costs a pass over each operand, and no wait for the device."""
    ranges = Ranges({id(m): name for name, m in model.named_modules() if isinstance(m, Fp8DecoderLayer)})
    observers.append(ranges)
    watchers.append(ranges)
    try:
        yield ranges
    finally:
        observers.remove(ranges)
        watchers.remove(ranges)
