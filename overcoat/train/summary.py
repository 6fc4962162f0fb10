"""Summary of a finished run: a table, a loss plot, a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from overcoat.extras import drawing
from overcoat.train.metrics import PLAIN, read_metrics, running_mean, shown_bytes, shown_passes
from overcoat.train.run import RunResult

# Line of the table: label, figure, how it is written, how a second run relates to the first.
Line = tuple[str, Callable[[RunResult], float], Callable[[float], str], Callable[[float, float], str]]


def _percent(mine: float, other: float) -> str:
    return f"{100 * (mine / other - 1):+.2f} %"


def _times(mine: float, other: float) -> str:
    return f"{mine / other:.3f} x" if other else ""


LINES: tuple[Line, ...] = (
    ("train loss, last tenth", lambda r: r.train_loss, "{:.4f}".format, _percent),
    ("held-out loss", lambda r: r.held_out_loss, "{:.4f}".format, _percent),
    ("kept for the backward", lambda r: r.kept_bytes, shown_bytes, _times),
    ("optimizer state", lambda r: r.optimizer_bytes, shown_bytes, _times),
    ("optimizer bytes / parameter", lambda r: r.optimizer_bytes / r.held_parameters, "{:.2f}".format, _times),
    ("tokens / s (median)", lambda r: r.tokens_per_second, "{:,.0f}".format, _times),
)
ON_A_CPU = "On a CPU FP8 is emulated in plain PyTorch: compare losses and bytes here, not tokens / s."
GPU_LINE: Line = ("peak GPU memory", lambda r: r.peak_bytes, shown_bytes, _times)


def summarize(results: list[RunResult], run_dir: Path, console: Console) -> dict[str, Any]:
    """Write loss.png and results.json, print the table, the sample and the paths; return the contents of
    results.json."""
    plot = run_dir / "loss.png"
    plot_losses(results, plot)
    summary: dict[str, Any] = {"runs": [asdict(result) for result in results], "plot": str(plot)}
    if len(results) == 2:
        summary["held_out_gap"] = results[0].held_out_loss / results[1].held_out_loss - 1
    (run_dir / "results.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    console.print(_table(results))
    first = results[0]
    if first.note:
        console.print(first.note, **PLAIN)
    if first.sample:
        console.print(Panel(Text(first.sample), title="a sample", title_align="left"))
    for label, place in (
        ("checkpoint", first.checkpoint),
        ("model (Hugging Face)", first.export),
        ("loss plot", str(plot)),
        ("metrics", first.metrics),
        ("these figures", str(run_dir / "results.json")),
    ):
        console.print(f"{label:22s}{place}", **PLAIN)
    return summary


def _table(results: list[RunResult]) -> Table:
    first = results[0]
    size = f"{first.num_parameters / 1e6:.1f} M parameters, {first.num_tokens / 1e6:.2f} M tokens"
    size += f", {shown_passes(first.passes)} passes" if first.passes else ""
    note = ON_A_CPU if first.device == "CPU" else None
    table = Table(title=size, caption=note, title_justify="left", caption_justify="left")
    table.add_column("")
    for title in [result.title for result in results] + [""][: len(results) - 1]:
        table.add_column(title, justify="right", min_width=9)  # of 80 columns; numbers are not split
    for label, figure, write, relate in (*LINES, *((GPU_LINE,) if first.device != "CPU" else ())):
        values = [figure(result) for result in results]
        relation = [relate(*values)] if len(results) == 2 else []
        table.add_row(label, *(Text(text, no_wrap=True) for text in [*map(write, values), *relation]))
    for name in (name for name in first.tasks if "_stderr" not in name):
        values = [result.tasks.get(name, math.nan) for result in results]
        table.add_row(name, *map("{:.4f}".format, values), *[""][: len(results) - 1])
    return table


def plot_losses(results: list[RunResult], path: Path) -> None:
    """Plot training loss (running mean over steps / 50) and held-out loss over tokens, one color per run."""
    with drawing(path, "hf", "the loss plot", 7, 4.5) as axes:
        for result, color, marker in zip(results, ("tab:blue", "tab:orange"), "ox", strict=False):
            metrics = read_metrics(Path(result.metrics))
            unit = result.num_tokens / result.steps / 1e6
            (steps, losses), held_out = (
                ([step * unit for step in rows], [row["loss"] for row in rows.values()])
                for rows in (metrics["train"], metrics["eval"])
            )
            means = running_mean(losses, max(1, result.steps // 50))
            axes.plot(steps, means, color=color, label=f"{result.title}, training", alpha=0.7)
            label = f"{result.title}, held out {result.held_out_loss:.4f}"
            axes.plot(*held_out, color=color, linestyle="", marker=marker, label=label)
        axes.set(xlabel="million tokens", ylabel="loss per token (nats)")
        axes.grid(alpha=0.3)
        axes.legend()
