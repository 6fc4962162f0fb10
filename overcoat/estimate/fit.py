"""Find what fits: the largest batch, and the cheapest change that makes a batch fit."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

from overcoat.estimate.meter import GRADIENTS
from overcoat.estimate.predict import LASTING, Prediction, Predictor
from overcoat.estimate.setup import Setup
from overcoat.formats.moments import MOMENT_CODES, resolve_moments

# The largest batch that is tried.
MOST_ROWS = 2**16
# How far a line through two batches is taken to be off: rows for each row beyond them, and bytes in any case, as the
# loss's chunks, experts, or a phase that is fullest at another moment bend it. Rows that take less are all run.
OFF, BEND = 0.1, 128 * 2**20


@dataclass(frozen=True)
class Room:
    """A request: a batch of rows of `sequence` tokens on `gpus` GPUs with `limit` bytes each."""

    predictor: Predictor
    batch: int
    sequence: int
    gpus: int
    limit: int

    def predict(self, setup: Setup, batch: Optional[int] = None) -> Prediction:
        """Predict the memory of a step of the requested batch, or of another."""
        return self.predictor.predict(batch or self.batch, self.sequence, setup, self.gpus)

    def fits(self, setup: Setup, batch: Optional[int] = None) -> bool:
        """True if a step fits on the GPU."""
        return self.predict(setup, batch).total_bytes <= self.limit

    def largest_batch(self, setup: Setup) -> int:
        """Return the most rows that fit on each GPU; 0 if one row does not."""
        rows = min(self.batch, MOST_ROWS)
        found = self.predict(setup, rows)
        if sum(found.components[name] for name in LASTING) > self.limit:
            return 0
        known = {rows: found}  # and what was run for other setups, whose optimizer alone differs
        for rows in self.predictor.batches(self.sequence, setup, self.gpus):
            known[rows] = self.predict(setup, rows)
        runs = 1
        while True:
            high = min((rows for rows in known if known[rows].total_bytes > self.limit), default=2 * MOST_ROWS)
            low = max((rows for rows in known if rows < high), default=0)
            if high - low == 1:
                return low
            points = {0: without_rows(found), **known}
            one = low if high in points else max(rows for rows in points if rows < low)
            other = high if high in points else low
            line = functools.partial(between, (one, points[one]), (other, points[other]))
            # Every phase is nearly a line in the rows: 2 or 3 runs, where doubling and halving take 13. A run that fits
            # is taken for the largest where half a row more is too much: experts bend the lines.
            if low and len(known) > 1 and line(low + 0.5) > self.limit:
                return low
            guess = low + bisect.bisect(range(low + 1, high), self.limit, key=line) if runs < 6 else (low + high) // 2
            if one and runs < 6:  # through runs: where it is clear enough, the answer is not run
                away = min(abs(guess - rows) for rows in known)
                if line(guess + OFF * away) + BEND <= self.limit < line(guess + 1 - OFF * (away + 1)) - BEND:
                    return guess
            rows, runs = min(max(guess, low + 1), high - 1), runs + 1
            known[rows] = self.predict(setup, rows)


def without_rows(prediction: Prediction) -> Prediction:
    """Return the bytes that do not depend on the batch."""
    there = {*LASTING, GRADIENTS}
    phases = [{name: size * (name in there) for name, size in each.items()} for each in prediction.by_phase]
    return replace(prediction, by_phase=phases)


def between(one: tuple[int, Prediction], other: tuple[int, Prediction], rows: float) -> int:
    """Return the bytes for `rows` rows, interpolated (or extrapolated) linearly from two batches, phase by phase."""
    share = (rows - one[0]) / (other[0] - one[0])
    pairs = zip(one[1].by_phase, other[1].by_phase, strict=True)
    first, last = max(pairs, key=lambda pair: (1 - share) * sum(pair[0].values()) + share * sum(pair[1].values()))
    fullest = {name: int(first.get(name, 0) + share * (size - first.get(name, 0))) for name, size in last.items()}
    return replace(other[1], components=fullest).total_bytes


# ---- what can be changed, the cheapest first ----------------------------------------------------------------------


class Change(NamedTuple):
    """A way to save memory: its name and price, the fields to set in a setup or, if `of_recipe`, in its recipe, and a
    function that is True if the setup can have them."""

    name: str
    price: str
    fields: dict[str, Any]
    of_recipe: bool = False
    possible: Callable[[Setup], bool] = lambda setup: True

    def apply(self, setup: Setup) -> Optional[Setup]:
        """Return the changed setup, or None if nothing would change."""
        if not self.possible(setup):
            return None
        fields = {"recipe": replace(setup.recipe, **self.fields)} if self.of_recipe else self.fields
        changed = replace(setup, **fields)
        return changed if changed != setup else None


def _has_wide_moments(setup: Setup) -> bool:
    return any(MOMENT_CODES[code].dtype.itemsize > 1 for code in resolve_moments(setup.moments))


_LOSS, _ROUNDING = "nothing: the loss is computed in chunks, without all logits", "the 8-bit rounding of the moments"
CHANGES = (
    Change("recipe.head = bf16", _LOSS, {"head": "bf16"}, True, lambda setup: setup.recipe.head is None),
    Change("recipe.name = default", "GEMMs in FP8", {"fp8": True}, True),
    Change(
        "recipe.kept_attention = 8bit", "the 8-bit rounding of what attention keeps", {"kept_attention": "8bit"}, True,
        lambda setup: setup.recipe.fp8 and setup.recipe.checkpoint is None,
    ),
    Change("optimizer.moments = 8bit", _ROUNDING, {"moments": "8bit"}, possible=_has_wide_moments),
    Change(
        "recipe.checkpoint = block", "each block's forward runs twice", {"checkpoint": "block"}, True,
        lambda setup: setup.recipe.fp8 and not setup.recipe.checkpoint,
    ),
    Change(
        "release_gradients", "no accumulation, no clipping by the norm of all gradients", {"release_gradients": True},
        possible=lambda setup: setup.accumulation == 1,
    ),
    Change(
        "optimizer.master = bf16", "weights rounded stochastically, nothing beside their BF16", {"master": "bf16"},
        possible=lambda setup: setup.dtype == "bfloat16",
    ),
    Change("optimizer.offload", "the states cross PCIe both ways in every step", {"offload": True}),
    Change(
        "recipe.offload_blocks = all", "what the blocks keep crosses PCIe both ways", {"offload_blocks": "all"}, True,
        lambda setup: setup.recipe.fp8,
    ),
)  # fmt: skip


class Rung(NamedTuple):
    """A setup that was tried for the requested batch, and the change that led to it (None: as requested)."""

    change: Optional[Change]
    prediction: Prediction


class Advice(NamedTuple):
    """rungs: the requested setup, then each change on top of the previous one. changes: the cheapest ones that make the
    batch fit, or None if all together do not; setup: the setup with them."""

    rungs: list[Rung]
    changes: Optional[list[Change]]
    setup: Setup


def advise(room: Room, setup: Setup) -> Advice:
    """Apply the changes in the order of their price until the batch fits, then drop those that are not needed."""
    rungs = [Rung(None, room.predict(setup))]
    for change in CHANGES:
        if changed := change.apply(rungs[-1].prediction.setup):
            rungs.append(Rung(change, room.predict(changed)))
    fitting = next((place for place, rung in enumerate(rungs) if rung.prediction.total_bytes <= room.limit), None)
    if fitting is None:
        return Advice(rungs, None, setup)
    wanted = [rung.change for rung in rungs[: fitting + 1] if rung.change is not None]
    for change in reversed(wanted[:-1]):
        fewer = [other for other in wanted if other is not change]
        if room.fits(_with(setup, fewer)):
            wanted = fewer
    return Advice(rungs, wanted, _with(setup, wanted))


def _with(setup: Setup, changes: Sequence[Change]) -> Setup:
    for change in changes:
        setup = change.apply(setup) or setup
    return setup
