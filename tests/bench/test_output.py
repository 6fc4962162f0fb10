"""Results for people: numbers under their titles, what is missing is said, every row with figures has a bar."""

from __future__ import annotations

from pathlib import Path

import pytest

from overcoat.bench.output import NAME_WIDTH, Column, Metric, bar_chart, decimals, heading, line, percent

COLUMNS = (
    Column("ms", "ms", decimals(2)),
    Column("kept MiB", "bytes", decimals(1, 2.0**-20)),
    Column("of", "s", percent),
)


def test_numbers_stand_under_their_titles() -> None:
    title = heading("7b", COLUMNS).splitlines()
    row = line({"name": "x", "ms": 1234.567, "bytes": 3 * 2**20, "s": 0.816}, COLUMNS)
    assert title[1] == "7b"
    assert len(title[2]) == len(row)
    assert row[:NAME_WIDTH].strip() == "x"
    assert row.split()[1:] == ["1,234.57", "3.0", "82%"]
    for word in ("ms", "kept MiB", "of"):
        assert row[title[2].index(word) + len(word) - 1] != " "


METRICS = (Metric("ms", ("forward_ms", "backward_ms")), Metric("kept MiB", ("kept",), 2.0**-20, 0))
ROWS = [
    {"group": "7b", "name": "overcoat", "forward_ms": 4.0, "backward_ms": 7.0, "kept": 2**28},
    {"group": "7b", "name": "bf16 eager", "forward_ms": 7.0, "backward_ms": 13.0, "kept": 2**30},
    {"group": "13b", "name": "overcoat", "forward_ms": 8.0, "backward_ms": 14.0, "kept": 2**29},
    {"group": "13b", "name": "bf16 eager", "error": "out of memory"},
]


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--plot bars\.png: nothing was measured"):
        bar_chart(tmp_path / "bars.png", "a GPU", ROWS[3:], METRICS)
