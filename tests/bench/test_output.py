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


def test_what_is_missing_is_said() -> None:
    assert line({"name": "x", "ms": 1.0, "bytes": None}, COLUMNS).split() == ["x", "1.00", "-", "-"]
    assert line({"name": "x", "error": "out of memory"}, COLUMNS).split(maxsplit=1) == ["x", "out of memory"]
    assert line({"name": "x", "absent": "not installed: y"}, COLUMNS).endswith("not installed: y")


METRICS = (Metric("ms", ("forward_ms", "backward_ms")), Metric("kept MiB", ("kept",), 2.0**-20, 0))
ROWS = [
    {"group": "7b", "name": "overcoat", "forward_ms": 4.0, "backward_ms": 7.0, "kept": 2**28},
    {"group": "7b", "name": "bf16 eager", "forward_ms": 7.0, "backward_ms": 13.0, "kept": 2**30},
    {"group": "13b", "name": "overcoat", "forward_ms": 8.0, "backward_ms": 14.0, "kept": 2**29},
    {"group": "13b", "name": "bf16 eager", "error": "out of memory"},
]


def test_a_png_is_written_with_one_panel_per_group_and_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    seen: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (seen.append(self), save(self, *a, **k)))
    path = tmp_path / "new" / "bars.png"
    bar_chart(path, "a GPU", ROWS, METRICS)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    titles = [axes.get_title() for axes in seen[0].axes]
    assert titles == ["7b: ms", "7b: kept MiB", "13b: ms", "13b: kept MiB"]
    # Two segments a bar: forward, and backward on top of it.
    assert [patch.get_width() for patch in seen[0].axes[0].patches] == [4.0, 7.0, 7.0, 13.0]
    assert [text.get_text() for text in seen[0].axes[0].texts] == ["11.0", "20.0"]
    assert len(seen[0].axes[2].patches) == 2


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--plot bars\.png: nothing was measured"):
        bar_chart(tmp_path / "bars.png", "a GPU", ROWS[3:], METRICS)
