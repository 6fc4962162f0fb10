"""Tables and loss curves of recorded training runs, compared with the baseline of the same seed and tokens.

python -m benchmarks.report benchmarks/results/paper.jsonl table3 curves.png      of `paper table3 --json`
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.paper.arms import BASELINE

Row = dict[str, Any]
LIMIT = 0.01  # nats: the gap to the baseline that the figure's band shows
SEED_STYLES = ("-", "--", ":", "-.")


def comparable(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows grouped by what must be equal for a comparison: data, configuration, settings, length."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        key = str([row[name] for name in ("data", "config", "set", "steps", "num_tokens")])
        found.setdefault(key, []).append(row)
    return list(found.values())


def by_run(rows: Iterable[Row]) -> dict[tuple[str, int], list[float]]:
    """Held-out losses by run and seed; several where a run was repeated."""
    losses: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        losses.setdefault((row["run"], row["seed"]), []).append(row["held_out_loss"])
    return losses


def gaps(rows: Iterable[Row]) -> dict[str, dict[int, float]]:
    """Held-out loss minus the baseline's of the same seed, by run and seed; repeated runs are averaged."""
    losses = by_run(rows)
    found: dict[str, dict[int, float]] = {}
    for (run, seed), values in losses.items():
        if run != BASELINE and (BASELINE, seed) in losses:
            gap = statistics.fmean(values) - statistics.fmean(losses[BASELINE, seed])
            found.setdefault(run, {})[seed] = gap
    return found


def noise(rows: Iterable[Row]) -> float | None:
    """Standard deviation of the held-out loss between repetitions of one run and seed; None if none was repeated."""
    variances = [statistics.variance(values) for values in by_run(rows).values() if len(values) > 1]
    return statistics.fmean(variances) ** 0.5 if variances else None


def table(rows: list[Row]) -> str:
    """The runs on the same tokens, their gaps to the baseline and the noise, as Markdown."""
    found = gaps(rows)
    first = rows[0]
    lines = [
        f"{first['num_parameters'] / 1e6:.0f} M parameters, {first['num_tokens'] / 1e6:.0f} M tokens\n",
        f"| run | seed | held-out loss | gap to {BASELINE} | tokens/s | peak GB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: (row["seed"], row["run"] != BASELINE, row["run"])):
        gap = found.get(row["run"], {}).get(row["seed"])
        lines.append(
            f"| {row['run']} | {row['seed']} | {row['held_out_loss']:.4f} | {'' if gap is None else f'{gap:+.4f}'} "
            f"| {row['tokens_per_second']:,.0f} | {row['peak_bytes'] / 1e9:.2f} |"
        )
    for run, values in found.items():
        if len(values) > 1:
            mean, error = statistics.fmean(values.values()), statistics.stdev(values.values()) / len(values) ** 0.5
            lines.append(f"\nMean gap of {run} over {len(values)} seeds: {mean:+.4f} +- {error:.4f}")
    if (deviation := noise(rows)) is not None:
        lines.append(f"\nStandard deviation between repetitions: {deviation:.4f}")
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], path: Path) -> None:
    """Left: training and held-out loss over tokens. Right: held-out loss minus the baseline's at each evaluation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), dpi=120)
    names = sorted({row["run"] for row in rows}, key=lambda name: (name != BASELINE, name))
    seeds = sorted({row["seed"] for row in rows})
    for row in rows:
        look = {"color": f"C{names.index(row['run'])}", "linestyle": SEED_STYLES[seeds.index(row["seed"]) % 4]}
        tokens = row["num_tokens"] / row["steps"] / 1e6
        train, held_out = numbers(row["train_losses"]), numbers(row["held_out_losses"])
        title = f"{row['run']}, seed {row['seed']}"
        left.plot([step * tokens for step in train], [*train.values()], linewidth=0.8, label=title, **look)
        left.plot([step * tokens for step in held_out], [*held_out.values()], "o", markersize=3, color=look["color"])
        gap = gap_curve(row, rows)
        right.plot([step * tokens for step in gap], [*gap.values()], marker="o", markersize=3, **look)
    late = [loss for row in rows for step, loss in numbers(row["train_losses"]).items() if step > row["steps"] / 10]
    if late:
        left.set_ylim(min(late) - 0.1, max(late))
    right.set_ylim(-5 * LIMIT, 5 * LIMIT)
    right.axhspan(-LIMIT, LIMIT, color="black", alpha=0.08)
    left.legend(fontsize=7)
    titles = ("training loss (lines), held-out loss (dots)", f"held-out loss minus {BASELINE}'s of the same seed")
    for axis, title in zip((left, right), titles, strict=True):
        axis.set(title=title, xlabel="million tokens", ylabel="nats per token")
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def gap_curve(row: Row, rows: list[Row]) -> dict[int, float]:
    """Held-out loss minus the mean of the baseline's of the same seed, by step; empty without a baseline."""
    others = [numbers(r["held_out_losses"]) for r in rows if (r["run"], r["seed"]) == (BASELINE, row["seed"])]
    if not others:
        return {}
    losses = numbers(row["held_out_losses"])
    return {step: loss - statistics.fmean(other[step] for other in others) for step, loss in losses.items()}


def numbers(losses: Mapping[Any, float]) -> dict[int, float]:
    """Losses by step; JSON has turned the steps into text."""
    return {int(step): loss for step, loss in losses.items()}


def report(rows: list[Row], figures: Path) -> None:
    """Print a table and draw the curves of every group of comparable rows."""
    for runs in comparable(rows):
        print(table(runs))
        draw(runs, figures / f"training-{runs[0]['num_tokens'] / 1e6:.0f}m.png")


def main(argv: list[str] | None = None) -> None:
    """Draw the curves of an exhibit's rows that `python -m benchmarks paper` has written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("exhibit")
    parser.add_argument("figure", type=Path)
    arguments = parser.parse_args(argv)
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    runs = [{**row, "run": row["arm"]} for row in rows if row["exhibit"] == arguments.exhibit and "seed" in row]
    longest = max(row["steps"] for row in runs)
    draw([row for row in runs if row["steps"] == longest and "train_losses" in row], arguments.figure)


if __name__ == "__main__":
    main()
