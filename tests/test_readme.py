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
        ("layer", 376, "total_ms", 1, "10.3"),
        ("layer", 381, "total_ms", 1, "20.8"),
        ("layer", 382, "total_ms", 1, "16.7"),
        ("layer", 383, "total_ms", 1, "11.9"),
        ("layer", 384, "total_ms", 1, "11.0"),
        ("layer", 385, "total_ms", 1, "11.4"),
        ("layer", 376, "kept_bytes", 2**-20, "371"),
        ("layer", 378, "kept_bytes", 2**-20, "33"),
        ("layer", 378, "total_ms", 1, "13.3"),
        ("layer", 398, "total_ms", 1, "22.4"),
        ("layer", 403, "total_ms", 1, "36.3"),
        ("layer", 405, "total_ms", 1, "24.9"),
        ("layer", 406, "total_ms", 1, "23.6"),
        ("layer", 409, "total_ms", 1, "11.0"),
        ("layer", 414, "total_ms", 1, "18.0"),
        ("layer", 416, "total_ms", 1, "12.9"),
        ("layer", 417, "total_ms", 1, "11.8"),
        ("layer", 330, "total_ms", 1, "3.3"),
        ("layer", 334, "total_ms", 1, "4.7"),
        ("layer", 336, "total_ms", 1, "4.0"),
        ("layer", 337, "total_ms", 1, "3.6"),
        ("layer", 420, "total_ms", 1, "7.4"),
        ("layer", 421, "total_ms", 1, "10.3"),
        ("layer", 422, "total_ms", 1, "8.5"),
        ("layer", 379, "total_ms", 1, "12.6"),
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
