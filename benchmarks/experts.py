"""The expert branch of a decoder layer alone: x + experts(norm(x)), its router included, in front of `layer`'s clock.

    overcoat                  `overcoat.convert` of the layer, the branch as that layer runs it
    bf16 IMPLEMENTATION ...   transformers' branch under one of its `experts_implementation`s

"compile" is torch.compile of the branch. transformers downloads the kernels of sonicmoe and deepgemm from the hub.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import overcoat
from benchmarks.contestants import Block
from overcoat import Recipe
from overcoat.models.decoder import as_they_are
from overcoat.models.family import Modules, decoder_layers, family_of


class Way(NamedTuple):
    """How an expert branch is run. experts: transformers' implementation; recipe: ours; needs: packages."""

    experts: str = "grouped_mm"
    recipe: Recipe | None = None
    is_compiled: bool = False
    needs: tuple[str, ...] = ()


WAYS = {
    "overcoat": Way(recipe=Recipe()),
    "overcoat leanest": Way(recipe=Recipe.leanest()),
    "bf16 grouped_mm": Way(),
    "bf16 grouped_mm, compile": Way(is_compiled=True),
    "bf16 sonicmoe": Way("sonicmoe", needs=("kernels",)),
    "bf16 deepgemm": Way("deepgemm", needs=("kernels",)),
}


class ExpertBranch(nn.Module):
    """The branch as its layer runs it; with a recipe that layer is a converted one."""

    def __init__(self, layer: Any, modules: Modules, recipe: Recipe | None) -> None:
        super().__init__()
        self.norm, self.experts = modules.pre, modules.owner
        self.run: Callable[[Tensor], Tensor] = self.own
        if recipe is not None:
            family = layer.overcoat_family
            self.run = lambda x: as_they_are(modules, family, x, {}, (), recipe)

    def own(self, x: Tensor) -> Tensor:
        y = self.experts(self.norm(x))
        return y[0] if isinstance(y, tuple) else y  # gpt-oss returns the router's scores as well

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, H) -> (B, S, H)."""
        return x + self.run(x)


def make_branch(name: str, model: Any) -> Block:
    """The contestant `name` of `WAYS`, made out of `model` of one layer, which it may change. ValueError: the layer
    has no experts, or ours leaves it alone."""
    way, (layer,) = WAYS[name], decoder_layers(model).values()
    family = family_of(layer)
    modules = next((each for each in family.branches(layer, 1) if each.mixer is None), None) if family else None
    if modules is None:
        raise ValueError(f"{type(layer).__name__} has no branch of experts")
    model.set_experts_implementation(way.experts)
    if way.recipe is not None and (report := overcoat.convert(model, way.recipe)).left_alone:
        raise ValueError(f"not converted:\n{report}")
    branch = ExpertBranch(layer, modules, way.recipe).train()
    if way.is_compiled:
        branch.compile()

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad for name, p in branch.named_parameters() if p.grad is not None}

    return Block(branch, branch, gradients)


@torch.no_grad()
def largest_load(block: Block, x: Tensor) -> float:
    """Return the tokens of the expert that has the most, divided by the mean."""
    chosen: list[Tensor] = []
    routers = [module for name, module in block.layer.named_modules() if name in ("experts.gate", "experts.router")]
    handles = [each.register_forward_hook(lambda *given: chosen.append(given[-1][-1])) for each in routers]
    block.layer.own(x)  # type: ignore[operator]
    for handle in handles:
        handle.remove()
    counts = chosen[0].flatten().bincount(minlength=len(routers[0].weight)).float()
    return float(counts.max() / counts.mean())
