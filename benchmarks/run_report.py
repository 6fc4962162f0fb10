"""Rows of training runs compared with those of a baseline: tables, gaps, noise, checks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]


def markdown(header: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    """A Markdown table: text to the left in the first column, figures to the right in the others."""
    header = list(header)
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (header, rule, *lines)) + "\n"


def checks_text(checks: dict[str, bool]) -> str:
    """One line per check."""
    return "".join(f"{'ok    ' if met else 'MISSED'}  {name}\n" for name, met in checks.items())


def comparable(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of runs that saw the same tokens with the same settings, but for the seed and what is compared."""
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


def gaps(rows: Iterable[Row], baseline: str) -> dict[str, dict[int, float]]:
    """Held-out loss minus the baseline's of the same seed, by run and seed; repeated runs are averaged."""
    losses = by_run(rows)
    found: dict[str, dict[int, float]] = {}
    for (run, seed), values in losses.items():
        if run != baseline and (baseline, seed) in losses:
            gap = statistics.fmean(values) - statistics.fmean(losses[baseline, seed])
            found.setdefault(run, {})[seed] = gap
    return found


def standard_error(values: list[float]) -> float | None:
    """Of the mean; None of a single value, where it is unknown."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def repeat_noise(rows: Iterable[Row]) -> float | None:
    """Standard deviation of the held-out loss between runs of one name and seed; None if none was repeated."""
    variances = [statistics.variance(values) for values in by_run(rows).values() if len(values) > 1]
    return statistics.fmean(variances) ** 0.5 if variances else None


def seed_noise(rows: Iterable[Row], run: str) -> float | None:
    """Largest difference between the held-out losses of a run's seeds; None of a single seed."""
    means = [statistics.fmean(values) for (name, _), values in by_run(rows).items() if name == run]
    return max(means) - min(means) if len(means) > 1 else None


# Columns of the table of runs: title, key in the row, how the figure is written.
COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("held-out loss", "held_out_loss", lambda row: f"{row['held_out_loss']:.4f}"),
    ("train loss", "train_loss", lambda row: f"{row['train_loss']:.4f}"),
    ("optimizer bytes", "optimizer_bytes", lambda row: f"{row['optimizer_bytes'] / row['num_parameters']:.3f}"),
    ("kept MB", "kept_bytes", lambda row: f"{row['kept_bytes'] / 1e6:,.0f}"),
    ("peak GB", "peak_bytes", lambda row: f"{row['peak_bytes'] / 1e9:.2f}"),
    ("tokens/s", "tokens_per_second", lambda row: f"{row['tokens_per_second']:,.0f}"),
)


def training_text(rows: list[Row], baseline: str, limit: float) -> str:
    """The runs on the same tokens, their gaps to the baseline, noise, and the checks, as Markdown."""
    first = rows[0]
    parts = [f"## Training, {first['num_parameters'] / 1e6:.1f} M parameters, {_data_text(first)}\n"]
    found = gaps(rows, baseline)
    columns = [column for column in COLUMNS if all(column[1] in row for row in rows)]
    lines = [
        [
            row["run"],
            row["seed"],
            *(write(row) for _, _, write in columns),
            f"{found[row['run']][row['seed']]:+.4f}" if row["seed"] in found.get(row["run"], {}) else "",
        ]
        for row in sorted(rows, key=lambda row: (row["seed"], row["run"] != baseline, row["run"]))
    ]
    parts.append(markdown(["run", "seed", *(title for title, _, _ in columns), f"gap to {baseline}"], lines))
    if found:
        parts.append(markdown(["gap", "seeds", "mean", "standard error"], _gap_lines(found)))
    noise, seeds = repeat_noise(rows), seed_noise(rows, baseline)
    if noise is not None:
        parts.append(f"Standard deviation between repetitions of one run: {noise:.4f}\n")
    if seeds is not None:
        parts.append(f"Largest gap between two seeds of {baseline}: {seeds:.4f}\n")
    parts.append(checks_text(training_checks(rows, baseline, limit)))
    return "\n".join(parts)


def _data_text(row: Row) -> str:
    tokens = f"{row['num_tokens'] / 1e6:.2f} M tokens"
    if (epoch := row.get("epoch_tokens")) is None:
        return tokens
    return f"{tokens}, {row['num_tokens'] / epoch:.2f} epochs of {epoch / 1e6:.2f} M"


def _gap_lines(found: dict[str, dict[int, float]]) -> Iterable[list[Any]]:
    for run, values in found.items():
        spread = standard_error([*values.values()])
        mean = f"{statistics.fmean(values.values()):+.4f}"
        yield [run, len(values), mean, "unknown" if spread is None else f"{spread:.4f}"]


def training_checks(rows: Iterable[Row], baseline: str, limit: float) -> dict[str, bool]:
    """Whether each run ends within `limit` of the baseline: per seed, and on average over several."""
    checks = {}
    for run, values in gaps(rows, baseline).items():
        for seed, gap in sorted(values.items()):
            checks[f"{run}, seed {seed}: held-out loss within {limit} of {baseline} ({gap:+.4f})"] = abs(gap) <= limit
        if len(values) > 1:
            mean = statistics.fmean(values.values())
            checks[f"{run}, mean of {len(values)} seeds: within {limit} of {baseline} ({mean:+.4f})"] = (
                abs(mean) <= limit
            )
    return checks
