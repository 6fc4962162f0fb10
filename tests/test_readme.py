"""README.md and docs/measured.md: every measurement that they cite is the recorded row of that commit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, MEASURED = ((ROOT / path).read_text() for path in ("README.md", "docs/measured.md"))
TEXT = README + MEASURED
# `file.jsonl:1,3-5`, then the commit, on the same line or the next.
CITED = re.findall(r"`(\w+\.jsonl):([\d,-]+)`,?\s+([0-9a-f]{7})", TEXT)


def test_every_citation_of_lines_names_a_commit() -> None:
    assert len(CITED) == len(re.findall(r"\.jsonl:\d", TEXT)) > 10


def test_the_readme_has_no_figure_of_its_own() -> None:
    """What stands in its table stands in docs/measured.md, whose figures are held against their rows below."""
    measured = (
        line for line in README.splitlines() if line.startswith("|") and ("the same" in line or ".jsonl" in line)
    )
    table = re.sub(r"`[^`]*`, \w{7}", "", "".join(measured))
    figures = figures_in(table)
    assert len(figures) > 25
    assert figures - figures_in(MEASURED) == set()


def figures_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.:,-])\d[\d,.]*\d(?![\w:-])", text))


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
        ("layer", 509, "total_ms", 1, "10.4"),
        ("layer", 517, "total_ms", 1, "21.3"),
        ("layer", 518, "total_ms", 1, "16.8"),
        ("layer", 522, "total_ms", 1, "11.1"),
        ("layer", 523, "total_ms", 1, "11.6"),
        ("layer", 520, "total_ms", 1, "12.0"),
        ("layer", 512, "total_ms", 1, "13.3"),
        ("layer", 514, "total_ms", 1, "12.6"),
        ("layer", 528, "total_ms", 1, "22.5"),
        ("layer", 531, "total_ms", 1, "45.3"),
        ("layer", 532, "total_ms", 1, "36.0"),
        ("layer", 534, "total_ms", 1, "23.7"),
        ("layer", 533, "total_ms", 1, "25.2"),
        ("layer", 537, "total_ms", 1, "11.0"),
        ("layer", 555, "total_ms", 1, "15.6"),
        ("layer", 540, "total_ms", 1, "21.6"),
        ("layer", 558, "total_ms", 1, "31.8"),
        ("layer", 541, "total_ms", 1, "17.9"),
        ("layer", 559, "total_ms", 1, "26.2"),
        ("layer", 543, "total_ms", 1, "11.7"),
        ("layer", 561, "total_ms", 1, "16.9"),
        ("layer", 542, "total_ms", 1, "13.0"),
        ("layer", 560, "total_ms", 1, "17.7"),
        ("layer", 564, "total_ms", 1, "12.8"),
        ("layer", 573, "total_ms", 1, "11.9"),
        ("layer", 567, "total_ms", 1, "25.1"),
        ("layer", 576, "total_ms", 1, "22.4"),
        ("layer", 568, "total_ms", 1, "21.7"),
        ("layer", 577, "total_ms", 1, "19.2"),
        ("layer", 570, "total_ms", 1, "13.8"),
        ("layer", 579, "total_ms", 1, "12.6"),
        ("layer", 569, "total_ms", 1, "15.1"),
        ("layer", 578, "total_ms", 1, "13.7"),
        ("layer", 498, "total_ms", 1, "3.5"),
        ("layer", 546, "total_ms", 1, "7.5"),
        ("layer", 502, "total_ms", 1, "7.2"),
        ("layer", 549, "total_ms", 1, "14.9"),
        ("layer", 503, "total_ms", 1, "4.8"),
        ("layer", 550, "total_ms", 1, "10.3"),
        ("layer", 506, "total_ms", 1, "3.7"),
        ("layer", 552, "total_ms", 1, "8.1"),
        ("layer", 505, "total_ms", 1, "4.1"),
        ("layer", 551, "total_ms", 1, "8.6"),
        ("layer", 501, "total_ms", 1, "3.4"),
        ("layer", 504, "total_ms", 1, "4.9"),
        ("layer", 509, "kept_bytes", 2**-20, "371"),
        ("layer", 517, "kept_bytes", 2**-20, "1,457"),
        ("layer", 518, "kept_bytes", 2**-20, "1,029"),
        ("layer", 520, "kept_bytes", 2**-20, "729"),
        ("layer", 522, "kept_bytes", 2**-20, "1,330"),
        ("layer", 512, "kept_bytes", 2**-20, "33"),
        ("layer", 509, "peak_bytes", 2**-20, "1,093"),
        ("layer", 517, "peak_bytes", 2**-20, "1,983"),
        ("layer", 518, "peak_bytes", 2**-20, "1,351"),
        ("layer", 520, "peak_bytes", 2**-20, "1,526"),
        ("layer", 522, "peak_bytes", 2**-20, "2,321"),
        ("layer", 512, "peak_bytes", 2**-20, "1,093"),
        ("model", 149, "tokens_per_second", 1, "169,078"),
        ("model", 150, "tokens_per_second", 1, "604,347"),
        ("model", 151, "tokens_per_second", 1, "429,881"),
        ("demo", 6, "tokens_per_second", 1, "612,717"),
        ("demo", 6, "tokens_per_second_bf16", 1, "315,493"),
        ("cards", 54, "tokens_per_second", 1, "4,010"),
        ("cards", 79, "tokens_per_second", 1, "16,528"),
        ("memory", 107, "measured", 2**-30, "44.3"),
        ("memory", 108, "measured", 2**-30, "47.6"),
        ("memory", 109, "measured", 2**-30, "45.1"),
        ("memory", 111, "measured", 2**-30, "26.2"),
        ("memory", 112, "measured", 2**-30, "13.6"),
        ("model", 134, "tokens_per_second", 1, "24,213"),
        ("model", 141, "tokens_per_second", 1, "21,367"),
        ("model", 132, "tokens_per_second", 1, "20,591"),
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
    assert cited in figures_in(MEASURED)
