"""The bar chart: a file with every row that has figures, and a clear word when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from overcoat.bench.plot import Metric, bar_chart

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
