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
        ("model", 116, "tokens_per_second", 1, "22,008"),
        ("model", 117, "tokens_per_second", 1, "13,961"),
        ("model", 119, "tokens_per_second", 1, "19,328"),
        ("model", 134, "tokens_per_second", 1, "24,213"),
        ("model", 141, "tokens_per_second", 1, "21,367"),
        ("model", 132, "tokens_per_second", 1, "20,591"),
        ("layer", 340, "total_ms", 1, "10.3"),
        ("layer", 344, "total_ms", 1, "20.5"),
        ("layer", 345, "total_ms", 1, "16.4"),
        ("layer", 346, "total_ms", 1, "11.7"),
        ("layer", 347, "total_ms", 1, "10.9"),
        ("layer", 348, "total_ms", 1, "11.2"),
        ("layer", 340, "kept_bytes", 2**-20, "371"),
        ("layer", 342, "kept_bytes", 2**-20, "33"),
        ("layer", 342, "total_ms", 1, "13.1"),
        ("layer", 350, "total_ms", 1, "22.2"),
        ("layer", 355, "total_ms", 1, "35.1"),
        ("layer", 356, "total_ms", 1, "24.5"),
        ("layer", 357, "total_ms", 1, "23.1"),
        ("layer", 360, "total_ms", 1, "10.8"),
        ("layer", 365, "total_ms", 1, "17.6"),
        ("layer", 366, "total_ms", 1, "12.4"),
        ("layer", 367, "total_ms", 1, "11.5"),
        ("layer", 330, "total_ms", 1, "3.3"),
        ("layer", 334, "total_ms", 1, "4.7"),
        ("layer", 336, "total_ms", 1, "4.0"),
        ("layer", 337, "total_ms", 1, "3.6"),
        ("layer", 300, "total_ms", 1, "5.3"),
        ("layer", 301, "total_ms", 1, "3.3"),
        ("layer", 302, "total_ms", 1, "4.8"),
        ("model", 144, "tokens_per_second", 1, "582,767"),
        ("model", 143, "tokens_per_second", 1, "114,345"),
        ("model", 145, "tokens_per_second", 1, "448,664"),
        ("training", 38, "held_out_loss", 1, "1.8083"),
        ("training", 37, "held_out_loss", 1, "1.8095"),
        ("optimizer", 209, "ms", 1, "3.7"),
        ("optimizer", 221, "ms", 1, "9.3"),
        ("model", 106, "tokens_per_second", 1, "3,708"),
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
