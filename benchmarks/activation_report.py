"""The result rows of `benchmarks.activations` as Markdown tables and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.activation_codes import relative_error
from benchmarks.activation_probes import GRADIENTS
from benchmarks.figures import pyplot, save
from benchmarks.run_report import Row, markdown

ATTENTION_GRADIENTS = ("dq", "dk", "dv")
# What COAT's non-linear layers keep; their error by layer is its Figure 4a.
KEPT = ("input norm: x", "post attention norm: x", "gate", "up")


def errors_text(row: Row) -> str:
    """SQNR of every tensor and code, and the kept tensors' relative error by layer."""
    of = f"{row['steps']} steps" if "steps" in row else "a checkpoint"
    parts = [f"## Activations of {row['model']} ({of}), {row['num_tokens']} tokens\n"]
    activations = [name for name in row["sqnr"] if name not in (*GRADIENTS, *ATTENTION_GRADIENTS)]
    for title, names in (
        ("activations", activations),
        ("output gradients", GRADIENTS),
        ("attention's gradients, q k v o coded", ATTENTION_GRADIENTS),
    ):
        parts.append(f"SQNR in dB, mean over the layers (worst layer): {title}\n")
        parts.append(means_table(row["sqnr"], names))
    parts.append("Largest |x| / rms, mean over the layers (most)\n")
    lines = [[name, mean_and(max, row["peaks"][name])] for name in activations if name in row["peaks"]]
    parts.append(markdown(["tensor", "peak"], lines))
    parts.append("Share of output gradients that become 0, mean over the layers (most)\n")
    codes = list(next(iter(row["lost"].values())))
    lines = [[name, *(mean_and(max, lost[code], ".1e") for code in codes)] for name, lost in row["lost"].items()]
    parts.append(markdown(["gradient", *codes], lines))
    parts.append(f"Relative error in %, by layer, rms over {', '.join(KEPT)}\n")
    parts.append(layers_table(row["sqnr"], KEPT))
    return "\n".join(parts)


def mean_and(extreme: Callable[[list[float]], float], layers: list[float], form: str = ".1f") -> str:
    """The mean over the layers, and in parentheses their minimum or maximum."""
    return f"{statistics.fmean(layers):{form}} ({extreme(layers):{form}})"


def means_table(sqnr: dict[str, dict[str, list[float]]], names: Iterable[str]) -> str:
    """Mean and worst layer of every code (columns) on the named tensors (rows); "" where a code was not tried."""
    names = list(names)
    codes = list(dict.fromkeys(code for name in names for code in sqnr[name]))
    lines = [
        [name, *(mean_and(min, sqnr[name][code]) if code in sqnr[name] else "" for code in codes)] for name in names
    ]
    return markdown(["tensor", *codes], lines)


def layers_table(sqnr: dict[str, dict[str, list[float]]], names: Iterable[str]) -> str:
    """Root mean square over the named tensors of the relative error in %, for every layer and code."""
    names = list(names)
    codes = list(sqnr[names[0]])
    lines = []
    for layer in range(len(sqnr[names[0]][codes[0]])):
        squares = {code: [relative_error(sqnr[name][code][layer]) ** 2 for name in names] for code in codes}
        lines.append([layer, *(f"{100 * statistics.fmean(squares[code]) ** 0.5:.2f}" for code in codes)])
    return markdown(["layer", *codes], lines)


def maximum_text(row: Row) -> str:
    """The time of the maximum, one column for each shape."""
    shapes = row["shapes"]
    names = [name for name in shapes[0] if name not in ("tokens", "hidden")]
    header = ["microseconds", *(f"{shape['tokens']} x {shape['hidden']}" for shape in shapes)]
    lines = [[name, *(f"{shape[name] * 1e3:.1f}" for shape in shapes)] for name in names]
    return "## Time of the maximum\n\n" + markdown(header, lines)


def draw_errors(row: Row, path: Path) -> None:
    """The paper's Figure 4a: relative error by layer, one panel for each tensor, one line for each code."""
    names = [name for name in row["sqnr"] if name not in (*GRADIENTS, *ATTENTION_GRADIENTS)]
    codes = list(dict.fromkeys(code for name in names for code in row["sqnr"][name]))
    columns = 4
    figure, axes = pyplot().subplots(-(-(len(names) + 1) // columns), columns, figsize=(15, 12), dpi=110, sharex=True)
    for name, axis in zip(names, axes.flat, strict=False):
        for code, values in row["sqnr"][name].items():
            errors = [100 * relative_error(value) for value in values]
            axis.plot(range(len(values)), errors, marker="o", markersize=3, color=f"C{codes.index(code)}")
        axis.set_yscale("log")
        axis.set_title(name, fontsize=9)
        axis.grid(alpha=0.3, which="both")
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    last = axes.flat[len(names)]
    for index, code in enumerate(codes):
        last.plot([], [], marker="o", color=f"C{index}", label=code)
    last.legend(loc="center", fontsize=9)
    figure.supxlabel("layer")
    figure.supylabel("relative error in %")
    save(figure, path)
