"""The sweep's part of docs/models.md: a table for each of transformers' mappings, between two comments."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path

import transformers

from tests.sweep.compare import Row

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = re.compile(r"<!-- sweep: ([a-z-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
HEAD = (
    "| kind | class | how it trains | loss without logits | dB: Overcoat / FP8 GEMMs alone |\n|---|---|---|---|---|\n"
)
LONGEST = 90  # characters of a reason


def line(row: Row) -> str:
    """Return a row of Markdown."""
    why = "; ".join(_cell(reason) for reason in row.reasons)
    trains = f"{row.trains}: {why}" if why else row.trains
    decibels = "" if row.ours is None or row.alone is None else f"{row.ours:.1f} / {row.alone:.1f}"
    wrong = " (see below)" if row.faults else ""
    return f"| `{row.kind}` | `{row.model}` | {trains} | {_cell(row.head)} | {decibels}{wrong} |\n"


def _cell(text: str) -> str:
    text = re.sub(r"([|<{*_`\[])", r"\\\1", " ".join(text.split()))
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rstrip(chr(92)).rstrip()} ..."


def table(rows: Sequence[Row], old: str = "") -> str:
    """Return a mapping's table; of kinds that are not among the rows it keeps the lines."""
    lines = {match[1]: match[0] for match in re.finditer(r"^\| `([^`]+)` \|.*\n", old, re.MULTILINE)}
    lines |= {row.kind: line(row) for row in rows}
    date = datetime.datetime.now(tz=datetime.timezone.utc).date()
    said = f"`python -m tests.sweep --write`, {date}, transformers {transformers.__version__}:"
    now = {row.kind for row in rows}
    faults = [match[0] for match in re.finditer(r"^\* `([^`]+)`: .*\n", old, re.MULTILINE) if match[1] not in now]
    faults += [f"* `{row.kind}`: {_cell(fault)}\n" for row in rows for fault in row.faults]
    return "".join([f"\n{said}\n\n{HEAD}", *(lines[kind] for kind in sorted(lines)), "\n", *faults])


def write(rows: dict[str, list[Row]], whole: bool, page: Path = PAGE) -> None:
    """Replace the tables of these mappings; whole: kinds that have no row now are gone."""
    text = page.read_text()
    places = {match[1] for match in TABLE.finditer(text)}
    if missing := rows.keys() - places:
        raise ValueError(f"{page} has no <!-- sweep: ... --> for {', '.join(sorted(missing))}")

    def replaced(match: re.Match[str]) -> str:
        mapping, old = match[1], match[2]
        if not rows.get(mapping):
            return match[0]
        return f"<!-- sweep: {mapping} -->\n{table(rows[mapping], '' if whole else old)}\n<!-- end -->"

    page.write_text(TABLE.sub(replaced, text))
