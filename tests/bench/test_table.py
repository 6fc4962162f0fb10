"""The printed table: aligned, and honest about what is missing."""

from __future__ import annotations

from overcoat.bench.table import NAME_WIDTH, Column, decimals, heading, line, percent

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


def test_what_is_missing_is_said() -> None:
    assert line({"name": "x", "ms": 1.0, "bytes": None}, COLUMNS).split() == ["x", "1.00", "-", "-"]
    assert line({"name": "x", "error": "out of memory"}, COLUMNS).split(maxsplit=1) == ["x", "out of memory"]
    assert line({"name": "x", "absent": "not installed: y"}, COLUMNS).endswith("not installed: y")
