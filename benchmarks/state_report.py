"""The result rows of `benchmarks.states` as Markdown tables, and whether they meet what is asked of the codes."""

from __future__ import annotations

from benchmarks.run_report import Row, checks_text, markdown
from benchmarks.state_codes import EXACT
from benchmarks.state_errors import CANDIDATES, DEFAULT, FLASH, INSTALLED, PAPER, TABLE_1, TABLE_8, fixed_pairs

Pair = tuple[str, str]

# "Among the best" of the 16 pairs of Table 1: one of this many.
AMONG_BEST = 2


def figure(value: float) -> str:
    """Three significant digits; no exponent for what errors usually are."""
    return f"{value:.3g}" if value >= 1000 or 0 < value < 0.001 else f"{value:#.3g}".rstrip(".")


def error(row: Row, pair: Pair, kind: str = "all", kept: bool = False) -> float | None:
    """The error of a pair on one type of parameter; None if it was not measured.

    kept: leave out the elements whose v the code loses.
    """
    key = "|".join(pair)
    if kept and key in row["kept_errors"]:
        return float(row["kept_errors"][key][kind])
    return float(row["errors"][key][kind]) if key in row["errors"] else None


def known_error(row: Row, pair: Pair, kind: str = "all", kept: bool = False) -> float:
    """`error` of a pair that is always measured."""
    value = error(row, pair, kind, kept)
    assert value is not None
    return value


def variations(row: Row) -> list[Pair]:
    """Variations of "8bit": the pairs measured beside those of the tables."""
    return [pair for pair in measured(row) if pair not in fixed_pairs() and EXACT not in pair]


def measured(row: Row) -> list[Pair]:
    """All pairs of a row."""
    return [(first, second) for first, second in (key.split("|") for key in row["errors"])]


# ---- one snapshot --------------------------------------------------------------------------------------


def snapshot_text(row: Row) -> str:
    """Everything measured on one snapshot, as Markdown."""
    kinds = list(row["elements"])
    parts = [f"## Step {row['step']} ({row['num_tokens'] / 1e6:.2f} M tokens), seed {row['seed']}\n"]
    parts.append("Error of m / sqrt(v), 1e4 x MSE / mean square, over all parameters.\n")
    for title, (firsts, seconds) in (("Table 1", TABLE_1), ("Table 8", TABLE_8)):
        lines = [[m, *(figure(known_error(row, (m, v))) for v in seconds)] for m in firsts]
        parts.append(markdown([f"{title}: m, v", *seconds], lines))
    lines = []
    for title, pair, num_bytes in CANDIDATES:
        if error(row, pair) is not None:
            by_kind = [figure(known_error(row, pair, kind)) for kind in kinds]
            lines.append([title, f"{num_bytes:.3f}", *by_kind, figure(known_error(row, pair, kept=True))])
    parts.append(markdown(["by type of parameter", "bytes", *kinds, "all, lost v left out"], lines))
    alone = [pair for pair in measured(row) if EXACT in pair and pair != (EXACT, EXACT)]
    for title, pairs in (("variations", [DEFAULT, *variations(row)]), ("one moment alone", alone)):
        lines = [[" x ".join(pair), *(figure(known_error(row, pair, kind)) for kind in kinds)] for pair in pairs]
        parts.append(markdown([title, *kinds], lines))
    if row["lost"]:
        lines = [[name, *(f"{share[kind]:.1e}" for kind in kinds)] for name, share in row["lost"].items()]
        parts.append(markdown(["share of v > 0 decoded to 0", *kinds], lines))
    names = list(row["medians"]["all"])
    parts.append(
        markdown(["medians", *kinds], [[name, *(row["medians"][kind][name] for kind in kinds)] for name in names])
    )
    parts.append(markdown(["code", "bits used"], row["entropy"].items()))
    parts.append(checks_text(snapshot_checks(row)))
    return "\n".join(parts)


def snapshot_checks(row: Row) -> dict[str, bool]:
    """What is asked of the codes, on one snapshot."""
    firsts, seconds = TABLE_1
    bases = ("e4m3", "e5m2")
    table = sorted(known_error(row, (m, v)) for m in firsts for v in seconds)
    flash = INSTALLED if error(row, INSTALLED) is not None else FLASH
    ours, paper = known_error(row, DEFAULT), known_error(row, PAPER)
    types = [kind for kind in row["elements"] if kind != "all"]
    return {
        "expanding v lowers the error in every row of Table 1": all(
            known_error(row, (m, base + "x")) < known_error(row, (m, base)) for m in firsts for base in bases
        ),
        "expanding m lowers the error in every column of Table 1": all(
            known_error(row, (base + "x", v)) < known_error(row, (base, v)) for v in seconds for base in bases
        ),
        "expanding DE8 helps m in every column of Table 8, not v (as in the paper)": all(
            known_error(row, ("de8x", v)) < known_error(row, ("de8", v)) for v in TABLE_8[1]
        )
        and all(known_error(row, (m, "de8x")) > known_error(row, (m, "de8")) for m in TABLE_8[0]),
        f"E4M3+X for both is among the best {AMONG_BEST} of the {len(table)} pairs of Table 1": (
            paper <= table[AMONG_BEST - 1]
        ),
        "8bit has at most half the error of the paper's rule": ours <= 0.5 * paper,
        "8bit has at most FlashOptim's error": ours <= known_error(row, flash),
        "8bit has at most FlashOptim's error, FlashOptim's lost v left out": (
            ours <= known_error(row, flash, kept=True)
        ),
        "8bit is never worse than the paper's rule on any type": all(
            known_error(row, DEFAULT, kind) <= known_error(row, PAPER, kind) for kind in types
        ),
    }
