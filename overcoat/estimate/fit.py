"""What fits: the largest batch, and the cheapest change that makes a batch fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

from overcoat.estimate.predict import Prediction, Predictor, Setup
from overcoat.formats.moments import MOMENT_CODES, resolve_moments

# No batch is looked for beyond this.
MOST_ROWS = 2**16


@dataclass(frozen=True)
class Room:
    """What is asked for: a batch of rows of `sequence` tokens on `gpus` GPUs with `limit` bytes each."""

    predictor: Predictor
    batch: int
    sequence: int
    gpus: int
    limit: int

    def predict(self, setup: Setup, batch: Optional[int] = None) -> Prediction:
        """Memory of a step, of the batch asked for unless another is given."""
        return self.predictor.predict(batch or self.batch, self.sequence, setup, self.gpus)

    def fits(self, setup: Setup, batch: Optional[int] = None) -> bool:
        """Whether a step finds room on the GPU."""
        return self.predict(setup, batch).total_bytes <= self.limit

    def largest_batch(self, setup: Setup) -> int:
        """The most rows that fit, on each GPU; 0 if one does not."""
        fits, too_large = 0, 1
        while too_large <= MOST_ROWS and self.fits(setup, too_large):
            fits, too_large = too_large, 2 * too_large
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            if self.fits(setup, middle):
                fits = middle
            else:
                too_large = middle
        return fits


# ---- what can be changed, the cheapest first ----------------------------------------------------------------------


class Change(NamedTuple):
    """A way to less memory: its name, its price, and the setup with it, or None where it changes nothing."""

    name: str
    price: str
    apply: Callable[[Setup], Optional[Setup]]


def _head(setup: Setup) -> Optional[Setup]:
    return replace(setup, recipe=replace(setup.recipe, head="bf16")) if setup.recipe.head is None else None


def _fp8(setup: Setup) -> Optional[Setup]:
    return None if setup.recipe.fp8 else replace(setup, recipe=replace(setup.recipe, fp8=True))


def _attention(setup: Setup) -> Optional[Setup]:
    recipe = setup.recipe
    changes = recipe.fp8 and recipe.checkpoint is None and recipe.kept_attention != "8bit"
    return replace(setup, recipe=replace(recipe, kept_attention="8bit")) if changes else None


def _moments(setup: Setup) -> Optional[Setup]:
    wide = any(MOMENT_CODES[code].dtype.itemsize > 1 for code in resolve_moments(setup.moments))
    return replace(setup, moments="8bit") if wide else None


def _checkpoint(setup: Setup) -> Optional[Setup]:
    recipe = setup.recipe
    return replace(setup, recipe=replace(recipe, checkpoint="block")) if recipe.fp8 and not recipe.checkpoint else None


def _release(setup: Setup) -> Optional[Setup]:
    possible = not setup.release_gradients and setup.accumulation == 1
    return replace(setup, release_gradients=True) if possible else None


def _bf16_weights(setup: Setup) -> Optional[Setup]:
    changes = setup.dtype == "bfloat16" and setup.master != "bf16"
    return replace(setup, master="bf16") if changes else None


def _offload(setup: Setup) -> Optional[Setup]:
    return None if setup.offload else replace(setup, offload=True)


def _offload_blocks(setup: Setup) -> Optional[Setup]:
    changes = setup.recipe.fp8 and setup.recipe.offload_blocks != "all"
    return replace(setup, recipe=replace(setup.recipe, offload_blocks="all")) if changes else None


CHANGES = (
    Change("recipe.head = bf16", "nothing: the loss is computed in chunks, without all logits", _head),
    Change("recipe.name = default", "products in FP8", _fp8),
    Change("recipe.kept_attention = 8bit", "the 8-bit rounding of what attention keeps", _attention),
    Change("optimizer.moments = 8bit", "the 8-bit rounding of the moments", _moments),
    Change("recipe.checkpoint = block", "each block's forward runs twice", _checkpoint),
    Change("release_gradients", "no accumulation, no clipping by the norm of all gradients", _release),
    Change("optimizer.master = bf16", "weights rounded stochastically, nothing beside their BF16", _bf16_weights),
    Change("optimizer.offload", "the states cross PCIe both ways in every step", _offload),
    Change("recipe.offload_blocks = all", "what the blocks keep crosses PCIe both ways", _offload_blocks),
)


class Rung(NamedTuple):
    """A setup that was looked at: the change that led to it (None: as asked for), and its step of the batch asked."""

    change: Optional[Change]
    setup: Setup
    prediction: Prediction


class Advice(NamedTuple):
    """rungs: the setup asked for, and one change after the other on top of it. changes: the cheapest of them that make
    the batch fit, or None if all together do not; setup: with them."""

    rungs: list[Rung]
    changes: Optional[list[Change]]
    setup: Setup


def advise(room: Room, setup: Setup) -> Advice:
    """Try the changes in the order of their price until the batch fits, then leave out those it fits without."""
    rungs = [Rung(None, setup, room.predict(setup))]
    for change in CHANGES:
        changed = change.apply(rungs[-1].setup)
        if changed is not None:
            rungs.append(Rung(change, changed, room.predict(changed)))
    wanted: list[Change] = []
    for rung in rungs:
        if rung.change is not None:
            wanted.append(rung.change)
        if rung.prediction.total_bytes <= room.limit:
            break
    else:
        return Advice(rungs, None, setup)
    for change in reversed(wanted[:-1]):
        fewer = [other for other in wanted if other is not change]
        if room.fits(_with(setup, fewer)):
            wanted = fewer
    return Advice(rungs, wanted, _with(setup, wanted))


def _with(setup: Setup, changes: Sequence[Change]) -> Setup:
    for change in changes:
        setup = change.apply(setup) or setup
    return setup
