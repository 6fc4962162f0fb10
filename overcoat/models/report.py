"""Report of `convert`: the treatment of each layer and the head, and what they ran at their last forward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

from torch import nn

from overcoat.models.decoder import checked_now
from overcoat.models.family import causal_models, model_spec_of, original_class
from overcoat.models.saved_bytes import BranchBytes, measure_branches, table
from overcoat.models.verify import Verified
from overcoat.recipe import Recipe

GONE = "gone: whatever has its place since is not converted; convert the model again"


class LayerReport(NamedTuple):
    """Treatment of one decoder layer or the head; `detail`: the treatment, or the reason why no block stands in for it.
    linears: how many of its linear layers compute in FP8 by themselves. own: modules beside the block that run as they
    are: a mixer that nothing was verified for, experts that are not in FP8."""

    name: str
    kind: str
    converted: bool
    detail: str
    linears: int = 0
    own: tuple[str, ...] = ()

    @property
    def grade(self) -> str:
        """Return "FP8", "FP8 in part", "linear layers in FP8", or "left alone"."""
        if self.converted:
            return "FP8 in part" if self.own else "FP8"
        return "linear layers in FP8" if self.linears else "left alone"


@dataclass
class Report:
    """The result of `convert`; prints as a table, consecutive equal rows folded into one line.

    head: what became of lm_head and the loss; None if the model has none (a bare `LlamaModel`, say).
    parts: of a vision-language model, how its tower, connector and text train, a line each; and other models beside
        the head's.
    weights: how many frozen weights are held in FP8 (`Recipe.frozen_weights`), a line each; why others are not.
    verified: by name of a converted layer how closely its own forward agrees with its block (models/verify.py).
    saved: what each branch saves for the backward, once `measure` was called.
    """

    recipe: Recipe
    layers: list[LayerReport] = field(default_factory=list)
    head: Optional[LayerReport] = None
    parts: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    verified: dict[str, Verified] = field(default_factory=dict)
    saved: list[BranchBytes] = field(default_factory=list)
    _modules: dict[str, tuple[weakref.ref[Any], weakref.ref[Any]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_modules": {}}

    def watch(self, name: str, module: nn.Module, model: nn.Module) -> None:
        """Include a converted module of a model in `running`, without keeping it alive."""
        self._modules[name] = weakref.ref(module), weakref.ref(model)

    def running(self) -> dict[str, str]:
        """Return what converted layers and the head ran at their last forward, by name: "FP8", "loss without logits",
        or why not. Compiled layers cannot be observed: for them it is what they would run now."""
        modules = {name: (module(), model()) for name, (module, model) in self._modules.items()}
        known = {name: module for name, (module, model) in modules.items() if module is not None or model is not None}
        return {name: GONE if module is None else _ran(module) for name, module in known.items()}

    def measure(self, model: nn.Module, batch: Mapping[str, Any]) -> list[BranchBytes]:
        """Return the bytes per token that each branch saves for the backward, its own and converted; printing the
        report then shows them. Two forwards of the model, without a backward, that hold one layer's tensors at a time.

        batch: the model's arguments, of a size that is trained with: attention in plain PyTorch saves more per token
            in longer rows.

        Raises:
            ValueError: the model is in `eval()`, has gradient checkpointing on, or is not the one that was converted.
        """
        self.saved = measure_branches(model, [row.name for row in self.layers], batch)
        return self.saved

    @property
    def converted(self) -> list[str]:
        """Names of the layers that now train in FP8."""
        return [layer.name for layer in self.layers if layer.converted]

    @property
    def left_alone(self) -> dict[str, str]:
        """Names of the decoder layers of which nothing trains in FP8, with the reason."""
        return {layer.name: layer.detail for layer in self.layers if layer.grade == "left alone"}

    @property
    def in_linear_layers(self) -> dict[str, str]:
        """Names of the decoder layers that run their own forward with large linear layers in FP8 (linear_layers.py),
        and the reason why no block stands in for them."""
        return {layer.name: layer.detail for layer in self.layers if layer.grade == "linear layers in FP8"}

    @property
    def in_part(self) -> dict[str, tuple[str, ...]]:
        """Names of the layers of which a block computes a part, and the modules that run as they are."""
        return {layer.name: layer.own for layer in self.layers if layer.grade == "FP8 in part"}

    def __str__(self) -> str:
        rows = []
        for _, alike in itertools.groupby(self.layers, lambda layer: layer[1:]):
            first, *others = alike
            name = f"{first.name} .. {others[-1].name} ({1 + len(others)})" if others else first.name
            detail = f"{first.linears} of each: {first.detail}" if first.grade.startswith("linear") else first.detail
            rows.append((name, first.kind, first.grade, detail))
        if self.head is not None:
            treatment = "loss without logits" if self.head.converted else "left alone"
            rows.append((self.head.name, self.head.kind, treatment, self.head.detail))
        head = ("layer", "class", "treatment", "detail")
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row[:3], widths, strict=True)), row[3]])
            for row in [head, *rows]
        ]
        total = f"{len(self.converted)} of {len(self.layers)} decoder layers train in FP8"
        total += f", {len(self.in_part)} of them in part" if self.in_part else ""
        total += f", {len(self.in_linear_layers)} in their linear layers" if self.in_linear_layers else ""
        below = [*self.parts, *self.weights, *_verified(self.verified), *table(self.saved), total]
        return "\n".join([*lines, *below])


def _verified(found: dict[str, Verified]) -> list[str]:
    """Return a line for the worst of the layers that were verified."""
    decibels = [each.decibels for each in found.values() if each.decibels is not None]
    how = " on a small twin" if any(each.twin for each in found.values()) else ""
    how += " on made-up arguments" if any(each.made_up for each in found.values()) else ""
    lines = [f"{len(decibels)} layers verified to {min(decibels):.0f} dB{how}"] if decibels else []
    reasons = [each.reason for each in found.values() if each.decibels is None]
    return [*lines, *(f"{reasons.count(reason)} layers not verified: {reason}" for reason in dict.fromkeys(reasons))]


def _ran(module: Any) -> str:
    ran: Optional[str] = getattr(module, "overcoat_ran", None)
    if ran is None and hasattr(module, "overcoat_arguments"):  # a layer
        ran = checked_now(module).reason
    return ran or "not seen to run: no forward yet, or compiled code alone"


def parts_of(model: nn.Module, report: Report) -> list[str]:
    """`Report.parts`."""
    (path, causal), *others = list(causal_models(model)) or [("", model)]
    whole, modules, lines = model_spec_of(causal), dict(causal.named_modules()), []
    places: tuple[tuple[str, str], ...] = ()
    if whole is not None and whole.vision:
        places = (("vision", whole.vision), ("connector", whole.connector), ("text", whole.text))
    for title, place in places:
        if place not in modules:  # dropped, to train the text alone
            continue
        inside = f"{path}.{place}.".removeprefix(".")
        layers, weights = [row for row in report.layers if row.name.startswith(inside)], modules[place]
        state = ", ".join({str(weight.dtype).removeprefix("torch.") for weight in weights.parameters()})
        if layers:
            state = f"{sum(row.converted for row in layers)} of {len(layers)} layers in FP8"
        frozen = "" if any(weight.requires_grad for weight in weights.parameters()) else ", frozen"
        lines.append(f"{title} ({inside[:-1]}): {state}{frozen}")
    if report.head is not None and report.head.converted:
        own = [name for name, each in others if model_spec_of(each) is not None and type(each) is original_class(each)]
        lines += [f"{name}: its loss is computed from all logits; convert it by itself, too" for name in own]
    return lines
