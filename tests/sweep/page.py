"""The sweep's part of docs/models.md: a table for each of transformers' mappings, between two comments."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from pathlib import Path

import transformers

from tests.sweep import tiny
from tests.sweep.compare import Row

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- python -m tests.sweep --write: begin -->", "<!-- end -->"
TITLES = {tiny.CAUSAL: "Causal language models", tiny.IMAGE_TEXT: "Models with images", tiny.ENCODERS: "Encoders"}
LONGEST = 90  # characters of a reason


def rendered(rows: dict[str, Iterable[Row]]) -> str:
    """Return the tables as Markdown; rows: by mapping."""
    date = datetime.datetime.now(tz=datetime.timezone.utc).date()
    lines = [BEGIN, "", f"`python -m tests.sweep --write`, {date}, transformers {transformers.__version__}."]
    for mapping, each in rows.items():
        lines += ["", f"### {TITLES[mapping]}", ""]
        lines += ["| kind | class | how it trains | loss without logits | dB: Overcoat / FP8 GEMMs alone |"]
        lines += ["|---|---|---|---|---|", *map(line, each)]
    return "\n".join([*lines, "", END])


def line(row: Row) -> str:
    why = "; ".join(_cell(reason) for reason in row.reasons)
    trains = f"{row.trains}: {why}" if why else row.trains
    decibels = "" if row.ours is None or row.alone is None else f"{row.ours:.1f} / {row.alone:.1f}"
    return f"| `{row.kind}` | `{row.model}` | {trains} | {_cell(row.head)} | {decibels} |"


def _cell(text: str) -> str:
    text = text.replace("|", r"\|").replace("<", "&lt;")
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rstrip()} ..."


def write(rows: dict[str, Iterable[Row]], page: Path = PAGE) -> None:
    """Replace the tables on the page."""
    text = page.read_text()
    found, count = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: rendered(rows), text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{page} has {count} places between {BEGIN!r} and {END!r}; one is needed")
    page.write_text(found)
