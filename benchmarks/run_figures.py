"""Loss curves of training runs, laid over each other, and how far each is from the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import pyplot, save
from benchmarks.run_report import Row

SEED_STYLES = ("-", "--", ":", "-.")


def draw_curves(rows: list[Row], baseline: str, limit: float, path: Path) -> None:
    """Left: training loss and, as dots, held-out loss over tokens. Right: held-out loss minus the baseline's of the
    same seed at every evaluation, beside +-limit. A colour for each run, a line style for each seed, as the left
    legend says."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(13, 5), dpi=120)
    names = sorted({row["run"] for row in rows}, key=lambda name: (name != baseline, name))
    seeds = sorted({row["seed"] for row in rows})
    named: set[str] = set()
    for row in sorted(rows, key=lambda row: (names.index(row["run"]), row["seed"])):
        index = names.index(row["run"])
        look = {"color": f"C{index}", "linestyle": SEED_STYLES[seeds.index(row["seed"]) % len(SEED_STYLES)]}
        title = f"{row['run']}, seed {row['seed']}"
        label = "_" if title in named else title  # one entry in the legend for all repetitions
        named.add(title)
        per_step = row["num_tokens"] / row["steps"] / 1e6
        train, held_out = numbers(row["train_losses"]), numbers(row["held_out_losses"])
        left.plot([step * per_step for step in train], [*train.values()], linewidth=0.8, alpha=0.7, label=label, **look)
        left.plot([step * per_step for step in held_out], [*held_out.values()], "o", markersize=3, color=f"C{index}")
        gap = gap_curve(row, rows, baseline)
        if gap:
            right.plot([step * per_step for step in gap], [*gap.values()], marker="o", markersize=3, **look)
    # The first tenth falls so far that the rest would be a flat line.
    late = [loss for row in rows for step, loss in numbers(row["train_losses"]).items() if step > row["steps"] / 10]
    left.set_ylim(min(late) - 0.1, max(late))
    right.set_ylim(-5 * limit, 5 * limit)  # the early, noisy part may leave it
    right.axhspan(-limit, limit, color="black", alpha=0.08, label=f"within {limit}")
    right.axhline(0, color="black", linewidth=0.5)
    titles = ("training loss (lines), held-out loss (dots)", f"held-out loss minus {baseline}'s, same seed")
    for axis, title in zip((left, right), titles, strict=True):
        axis.set_title(title)
        axis.set_xlabel("million tokens")
        axis.set_ylabel("nats per token")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="upper right")
    save(figure, path)


def gap_curve(row: Row, rows: list[Row], baseline: str) -> dict[int, float]:
    """Held-out loss minus the baseline's of the same seed (the mean, if it was repeated), by step.

    Empty without a baseline, and for one that was not repeated: it would be compared with itself.
    """
    others = [numbers(r["held_out_losses"]) for r in rows if (r["run"], r["seed"]) == (baseline, row["seed"])]
    if not others or (row["run"] == baseline and len(others) == 1):
        return {}
    return {
        step: loss - statistics.fmean(other[step] for other in others)
        for step, loss in numbers(row["held_out_losses"]).items()
    }


def numbers(losses: Mapping[Any, float]) -> dict[int, float]:
    """Losses by step; JSON turned the steps into text."""
    return {int(step): loss for step, loss in losses.items()}
