"""The console of a run: control characters in text from files and users are escaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from overcoat.extras import printable


class PrintableConsole(Console):
    """A rich console that escapes control characters in all text, but not rich's own."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
