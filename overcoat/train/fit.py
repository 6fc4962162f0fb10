"""What may change in a running run without changing what it learns: how many rows pass at once, and whether converted
blocks keep only their inputs.

A step always takes `train.rows_per_step` rows in equal micro-batches, of a divisor of their number. Another fit changes
neither the rows of a step nor the weight of a label: other micro-batches are other tensors to find an FP8 scale for,
and add their gradients in another order; block checkpoints round each block's input to 8 bits (`Recipe.checkpoint`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import overcoat
from overcoat.train.build import make_recipe
from overcoat.train.config import Config


class Fit(NamedTuple):
    """micro_batch: rows in one forward pass. block_checkpoints: `checkpoint="block"`, whatever the recipe says."""

    micro_batch: int
    block_checkpoints: bool = False

    def __str__(self) -> str:
        rows = "1 row" if self.micro_batch == 1 else f"{self.micro_batch} rows"
        return f"{rows} in a forward pass" + (", block checkpoints" if self.block_checkpoints else "")


def divisors(count: int) -> list[int]:
    """Of a number of rows, the largest first."""
    small = [size for size in range(1, math.isqrt(count) + 1) if count % size == 0]
    return sorted({*small, *(count // size for size in small)}, reverse=True)


def recipe_of(config: Config, fit: Fit) -> overcoat.Recipe:
    """The configured recipe as the fit has it."""
    recipe = make_recipe(config.recipe)
    return replace(recipe, checkpoint="block") if fit.block_checkpoints else recipe


def with_block_checkpoints(config: Config, fit: Fit) -> Fit | None:
    """The same batch with block checkpoints; None if it has them, or has no FP8 blocks."""
    recipe = recipe_of(config, fit)
    return fit._replace(block_checkpoints=True) if recipe.fp8 and recipe.checkpoint is None else None


def with_fewer_rows(config: Config, fit: Fit) -> Fit | None:
    """The next smaller micro-batch; None if there is none, or gradients are released and cannot accumulate."""
    if config.optimizer.release_gradients:
        return None
    smaller = [size for size in divisors(config.train.rows_per_step) if size < fit.micro_batch]
    return fit._replace(micro_batch=smaller[0]) if smaller else None


def next_leaner(config: Config, fit: Fit) -> Fit | None:
    """What to try when a step with `fit` ran out of memory, as `train.on_oom` says; None if nothing is left."""
    if config.train.on_oom == "error":
        return None
    ways = [with_fewer_rows, with_block_checkpoints]
    if config.train.on_oom == "leaner_recipe":
        ways.reverse()
    return next((leaner for way in ways if (leaner := way(config, fit)) is not None), None)


def leanest(fits: Iterable[Fit]) -> Fit:
    """The fit that has what any of them has less."""
    known = list(fits)
    return Fit(min(fit.micro_batch for fit in known), any(fit.block_checkpoints for fit in known))
