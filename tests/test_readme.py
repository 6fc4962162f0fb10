"""README.md: every measurement that it cites is the recorded row of that commit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# `file.jsonl:1,3-5`, then the commit, on the same line or the next.
CITED = re.findall(r"`(\w+\.jsonl):([\d,-]+)`,?\s+([0-9a-f]{7})", README)


def test_every_citation_of_lines_names_a_commit() -> None:
    assert len(CITED) == len(re.findall(r"\.jsonl:\d", README)) > 10


@pytest.mark.parametrize(("name", "lines", "commit"), CITED, ids=lambda part: part)
def test_cited_lines_are_rows_of_the_commit(name: str, lines: str, commit: str) -> None:
    rows = (ROOT / "benchmarks" / "results" / name).read_text().splitlines()
    for part in lines.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            assert json.loads(rows[number - 1])["commit"] == commit, number


@pytest.mark.parametrize(
    ("name", "line", "field", "scale", "cited"),
    [
        ("model", 69, "tokens_per_second", 1, "21,583"),
        ("model", 70, "tokens_per_second", 1, "13,880"),
        ("model", 71, "tokens_per_second", 1, "18,835"),
        ("model", 101, "tokens_per_second", 1, "24,111"),
        ("model", 103, "tokens_per_second", 1, "20,555"),
        ("layer", 247, "total_ms", 1, "10.2"),
        ("layer", 254, "total_ms", 1, "20.4"),
        ("layer", 255, "total_ms", 1, "16.5"),
        ("layer", 256, "total_ms", 1, "11.7"),
        ("layer", 247, "kept_bytes", 2**-20, "371"),
        ("layer", 250, "kept_bytes", 2**-20, "33"),
        ("optimizer", 189, "ms", 1, "3.7"),
        ("optimizer", 201, "ms", 1, "9.3"),
        ("cards", 39, "tokens_per_second", 1, "16,525"),
        ("memory", 80, "measured", 2**-30, "44.4"),
        ("memory", 85, "measured", 2**-30, "13.8"),
        ("training", 36, "tokens_per_second", 1, "3,654"),
    ],
)
def test_headline_figures_are_those_of_their_rows(name: str, line: int, field: str, scale: float, cited: str) -> None:
    row = json.loads((ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines()[line - 1])
    digits = len(cited.partition(".")[2])
    assert f"{row[field] * scale:,.{digits}f}" == cited
    assert cited in README
