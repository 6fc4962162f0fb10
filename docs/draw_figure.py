"""Draw figures from result rows.

python docs/draw_figure.py

    docs/assets/llama-2-7b.png    speed and memory of a Llama-2-7B training step, ours and the peers'
    docs/assets/outliers.png      how far the neighbours of an outlier go under each format of AdamW's moments
    docs/assets/muon.png          a training loss over time under AdamW and Muon
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parent
ROWS = DOCS.parent / "benchmarks" / "results" / "model.jsonl"
COMMIT = "6a843a0"  # the newest run with all of these peers
# Names in the rows, from top to bottom, and what the figure calls them.
NAMES = {
    "overcoat": "Overcoat",
    "transformer engine delayed, FlashAdamW": "Transformer Engine FP8\n+ FlashAdamW",
    "torchao tensorwise, torch AdamW": "torchao FP8, compiled\n+ torch AdamW",
    "bf16 compile, torch AdamW": "BF16, compiled\n+ torch AdamW",
}
OURS, PEERS = "#0f766e", "#b8c0cc"


# Formats of the moments in outliers.jsonl, what the figure calls them, and their colours.
MOMENTS = {
    "8bit": ('"8bit"', OURS),
    "fp8": ('"fp8", the paper\'s', "#c2410c"),
    "sqrt8 log8": ('"8bit" until now', "#94a3b8"),
}


def draw_outliers() -> None:
    """The way of an outlier's neighbours over the ratio of their gradients."""
    rows = [json.loads(line) for line in (ROWS.parent / "outliers.jsonl").read_text().splitlines()]
    run = {row["moments"]: row for row in rows if row["beta2"] == 0.999}  # the newest of each
    pyplot.rcParams.update({"font.size": 11, "font.family": "DejaVu Sans"})
    figure, axis = pyplot.subplots(figsize=(8, 3.4), dpi=100, facecolor="white")
    for name, (label, color) in MOMENTS.items():
        ratios = [10**exponent for exponent in run[name]["log10_ratio"]]
        axis.plot(ratios, run[name]["steady"]["mean"], color=color, label=label, linewidth=2)
    axis.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    axis.set_xlabel("one gradient of 128 is larger than the others by")
    axis.set_title("Way of the others in 300 steps, FP32 AdamW's = 1", loc="left", fontsize=12)
    axis.set_ylim(0, 1.5)
    axis.legend(frameon=False, loc="lower left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "assets" / "outliers.png")


# Runs of training.jsonl, what the figure calls them, and their colours.
RUNS = {
    "adamw": ("AdamW, learning rate 6e-4", "#94a3b8"),
    "muon": ("Muon, 6e-4", "#c2410c"),
    "muon-2e-3": ("Muon, 2e-3", OURS),
}


def draw_muon() -> None:
    """The training loss over the seconds of the steps."""
    rows = [json.loads(line) for line in (ROWS.parent / "training.jsonl").read_text().splitlines()]
    found = {row["run"]: row for row in rows if row.get("kind") == "muon over time"}  # the newest of each
    pyplot.rcParams.update({"font.size": 11, "font.family": "DejaVu Sans"})
    figure, axis = pyplot.subplots(figsize=(8, 3.4), dpi=100, facecolor="white")
    for name, (label, color) in RUNS.items():
        _, seconds, losses = zip(*found[name]["points"], strict=True)
        axis.plot(seconds, losses, color=color, label=label, linewidth=2)
    axis.set_xlabel("seconds of steps, one H200")
    axis.set_title("Training loss, Llama of 124 M parameters, 21 M tokens", loc="left", fontsize=12)
    axis.set_ylim(2, 7)
    axis.legend(frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "assets" / "muon.png")


def main() -> None:
    """Two bar charts side by side, the outliers' neighbours, Muon beside AdamW."""
    draw_outliers()
    draw_muon()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    run = {row["name"]: row for row in rows if row["commit"] == COMMIT}
    speeds = [run[name]["tokens_per_second"] for name in NAMES]
    peaks = [run[name]["peak_bytes"] / 2**30 for name in NAMES]
    pyplot.rcParams.update({"font.size": 15, "font.family": "DejaVu Sans"})
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4.6), dpi=110, sharey=True, facecolor="white")
    panels = (
        (axes[0], speeds, "Tokens per second", "{:,.0f}"),
        (axes[1], peaks, "Peak GPU memory in GiB", "{:.1f}"),
    )
    places = range(len(NAMES))
    for axis, values, title, form in panels:
        bars = axis.barh(places, values, color=[OURS if place == 0 else PEERS for place in places], height=0.66)
        labels = axis.bar_label(bars, [form.format(value) for value in values], padding=6, fontsize=16)
        labels[0].set_fontweight("bold")
        axis.set_title(title, loc="left", fontsize=17, fontweight="bold")
        axis.set_xlim(0, max(values) * 1.2)
        axis.set_xticks([])
        axis.tick_params(length=0)
        for side in ("top", "right", "bottom"):
            axis.spines[side].set_visible(False)
    axes[0].set_yticks(list(places), list(NAMES.values()))
    axes[0].get_yticklabels()[0].set_fontweight("bold")
    axes[0].invert_yaxis()
    caption = "Llama-2-7B, full training step, batch 4 x 2048 tokens, one NVIDIA H200, all in one run"
    figure.text(0.01, 0.015, caption, fontsize=14, color="#333333")
    figure.tight_layout(rect=(0, 0.06, 1, 1), w_pad=2)
    figure.savefig(DOCS / "assets" / "llama-2-7b.png")


if __name__ == "__main__":
    main()
