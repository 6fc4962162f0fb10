"""What the images of the research scripts share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overcoat.train.extras import load_extra


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files."""
    load_extra("matplotlib", "bench", "drawing the figures").use("Agg")
    return load_extra("matplotlib.pyplot", "bench", "drawing the figures")


def save(figure: Any, path: Path) -> None:
    """Write the figure and let go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path)
    pyplot().close(figure)
