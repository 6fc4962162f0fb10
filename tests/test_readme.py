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
        ("model", 152, "tokens_per_second", 1, "21,883"),
        ("model", 153, "tokens_per_second", 1, "13,869"),
        ("model", 154, "tokens_per_second", 1, "19,060"),
        ("model", 155, "tokens_per_second", 1, "19,223"),
        ("model", 157, "tokens_per_second", 1, "23,224"),
        ("model", 163, "tokens_per_second", 1, "20,307"),
        ("model", 162, "tokens_per_second", 1, "20,028"),
        ("sharded", 7, "tokens_per_second_per_gpu", 1, "18,449"),
        ("sharded", 11, "tokens_per_second_per_gpu", 1, "12,323"),
        ("layer", 484, "total_ms", 1, "10.6"),
        ("layer", 489, "total_ms", 1, "21.2"),
        ("layer", 490, "total_ms", 1, "17.2"),
        ("layer", 491, "total_ms", 1, "12.3"),
        ("layer", 492, "total_ms", 1, "11.2"),
        ("layer", 493, "total_ms", 1, "11.7"),
        ("layer", 486, "total_ms", 1, "13.5"),
        ("layer", 487, "total_ms", 1, "12.9"),
        ("layer", 444, "total_ms", 1, "15.4"),
        ("layer", 454, "total_ms", 1, "12.7"),
        ("layer", 464, "total_ms", 1, "11.9"),
        ("layer", 449, "total_ms", 1, "25.9"),
        ("layer", 459, "total_ms", 1, "21.4"),
        ("layer", 469, "total_ms", 1, "19.0"),
        ("layer", 451, "total_ms", 1, "16.7"),
        ("layer", 461, "total_ms", 1, "13.6"),
        ("layer", 471, "total_ms", 1, "12.5"),
        ("layer", 450, "total_ms", 1, "17.7"),
        ("layer", 460, "total_ms", 1, "14.9"),
        ("layer", 470, "total_ms", 1, "13.5"),
        ("layer", 434, "total_ms", 1, "4.1"),
        ("layer", 436, "total_ms", 1, "3.4"),
        ("layer", 437, "total_ms", 1, "7.1"),
        ("layer", 438, "total_ms", 1, "4.8"),
        ("layer", 440, "total_ms", 1, "4.0"),
        ("layer", 441, "total_ms", 1, "3.7"),
        ("layer", 484, "kept_bytes", 2**-20, "371"),
        ("layer", 486, "kept_bytes", 2**-20, "33"),
        ("layer", 484, "peak_bytes", 2**-20, "1,093"),
        ("layer", 490, "peak_bytes", 2**-20, "1,351"),
        ("layer", 491, "peak_bytes", 2**-20, "1,492"),
        ("layer", 492, "peak_bytes", 2**-20, "2,321"),
        ("layer", 489, "peak_bytes", 2**-20, "1,951"),
        ("layer", 478, "total_ms", 1, "3.41"),
        ("layer", 479, "total_ms", 1, "3.75"),
        ("model", 149, "tokens_per_second", 1, "169,078"),
        ("model", 150, "tokens_per_second", 1, "604,347"),
        ("model", 151, "tokens_per_second", 1, "429,881"),
        ("demo", 6, "tokens_per_second", 1, "612,717"),
        ("demo", 6, "tokens_per_second_bf16", 1, "315,493"),
        ("cards", 54, "tokens_per_second", 1, "4,010"),
        ("cards", 56, "tokens_per_second", 1, "17,156"),
        ("memory", 107, "measured", 2**-30, "44.3"),
        ("memory", 108, "measured", 2**-30, "47.6"),
        ("memory", 109, "measured", 2**-30, "45.1"),
        ("memory", 111, "measured", 2**-30, "26.2"),
        ("memory", 112, "measured", 2**-30, "13.6"),
        ("model", 134, "tokens_per_second", 1, "24,213"),
        ("model", 141, "tokens_per_second", 1, "21,367"),
        ("model", 132, "tokens_per_second", 1, "20,591"),
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
        ("training", 38, "held_out_loss", 1, "1.8083"),
        ("training", 37, "held_out_loss", 1, "1.8095"),
        ("optimizer", 209, "ms", 1, "3.7"),
        ("optimizer", 221, "ms", 1, "9.3"),
        ("model", 106, "tokens_per_second", 1, "3,708"),
        ("training", 36, "tokens_per_second", 1, "3,654"),
    ],
)
def test_headline_figures_are_those_of_their_rows(name: str, line: int, field: str, scale: float, cited: str) -> None:
    row = json.loads((ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines()[line - 1])
    digits = len(cited.partition(".")[2])
    assert f"{row[field] * scale:,.{digits}f}" == cited
    assert cited in README
