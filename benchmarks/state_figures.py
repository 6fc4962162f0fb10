"""The paper's Figures 2 and 3 on real states: dynamic range and k; use of the codes.

Drawn from the histograms of one snapshot row (`benchmarks.state_use.use_table`), so they can be drawn again without a
GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import pyplot, save
from overcoat.formats import E4M3
from overcoat.formats.expansion import EXPONENT_STEPS, FORMAT_RANGE_LOG2

MOMENT_TITLES = {"m": "first moment m", "v": "second moment v"}
EIGHT_BIT = {"m": "sqrt8", "v": "log8"}


def draw_ranges(row: dict[str, Any], path: Path) -> None:
    """Figure 2: per moment, the dynamic range of the groups before and after expansion, and the histogram of k."""
    figure, axes = pyplot().subplots(2, 2, figsize=(10, 6.5), dpi=110)
    for (key, title), (left, right) in zip(MOMENT_TITLES.items(), axes, strict=True):
        for name, color, label in (
            ("octaves", "tab:blue", "as it is"),
            ("octaves expanded", "tab:orange", "expanded"),
        ):
            share = _shares(row["histograms"][f"{key}/{name}"])
            left.bar([0.5 * bin + 0.25 for bin in range(len(share))], share, 0.5, color=color, alpha=0.6, label=label)
        left.axvline(FORMAT_RANGE_LOG2["e4m3"], color="black", linestyle="--", label="range of E4M3")
        left.set_xlim(0, 1.5 * FORMAT_RANGE_LOG2["e4m3"])
        left.set_title(f"{title}: dynamic range of a group")
        left.set_xlabel("octaves from the smallest value above 0 to the maximum")
        for name, color, label in (
            ("exponents", "tab:orange", "that fills the range (the paper's rule)"),
            ("exponents searched", "tab:green", "with the least error of m / sqrt(v)"),
        ):
            share = _halved(_shares(row["histograms"][f"{key}/{name}"]))
            centres = [(2 * bin + 1) / EXPONENT_STEPS for bin in range(len(share))]
            right.bar(centres, share, 2 / EXPONENT_STEPS, color=color, alpha=0.6, label=label)
        right.set_xlim(0, 6 if key == "m" else 16)
        right.set_title(f"{title}: exponent k of a group")
        right.set_xlabel("k")
    for axis in axes.flat:
        axis.set_ylabel("share of groups")
        axis.set_ylim(top=1.25 * axis.get_ylim()[1])  # room for the legend
        axis.legend(fontsize=8)
    save(figure, path)


def draw_codes(row: dict[str, Any], path: Path) -> None:
    """Figure 3: per moment, how often each magnitude of E4M3 occurs, before and after expansion, and each code of
    "8bit"."""
    figure, axes = pyplot().subplots(2, 2, figsize=(10, 6.5), dpi=110)
    values = torch.arange(127, dtype=torch.uint8).view(E4M3.dtype).float().tolist()
    marks = [index for index, value in enumerate(values) if value in (2.0**-6, 2.0**-3, 1.0, 8.0, 64.0, 448.0)]
    for (key, title), (left, right) in zip(MOMENT_TITLES.items(), axes, strict=True):
        for name, color, label in (("e4m3", "tab:blue", "as it is"), ("e4m3x", "tab:orange", "expanded")):
            share = _shares(row["histograms"][f"{key}/{name}"])[:127]
            bits = row["entropy"][f"{key}/{name}"]
            left.bar(range(127), share, 1.0, color=color, alpha=0.6, label=f"{label}, {bits:.2f} bits used")
        left.set_xticks(marks, [f"{values[mark]:.3g}" for mark in marks])
        left.set_title(f"{title}: magnitudes of E4M3")
        left.set_xlabel("|q|, one bar per code")
        name = EIGHT_BIT[key]
        share = _shares(row["histograms"][f"{key}/{name}"])
        bits = row["entropy"][f"{key}/{name}"]
        right.bar(range(len(share)), share, 1.0, color="tab:green", label=f"{bits:.2f} bits used")
        right.set_title(f"{title}: {'magnitudes of ' if key == 'm' else ''}{name}")
        right.set_xlabel("code")
    for axis in axes.flat:
        axis.set_ylabel("share of elements")
        axis.set_ylim(top=1.25 * axis.get_ylim()[1])  # room for the legend
        axis.legend(fontsize=8)
    save(figure, path)


def _shares(counts: list[int]) -> list[float]:
    total = max(1, sum(counts))
    return [count / total for count in counts]


def _halved(shares: list[float]) -> list[float]:
    """Neighbours added in pairs: the searched k are eighths, the rule's sixteenths."""
    return [sum(shares[start : start + 2]) for start in range(0, len(shares), 2)]
