"""Charts as HTML: lines in an SVG that stretches to the page's width, with text next to it that does not stretch.

Colours are variables of the page's style, so they follow the reader's light or dark mode. The page also contains the
data as JSON, to show values at the pointer.
"""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from overcoat.estimate.phases import kind_of
from overcoat.extras import load_extra

SIDE = 1000  # of the SVG's own coordinates
MOST_POINTS = 500
Points = list[tuple[float, float]]


class Series(NamedTuple):
    """color: a variable of the style; look: "line", "faint", "dots", "dashed", or for phases "steps" or "area". Stacked
    areas come from the highest down, each with the sum of those below."""

    name: str
    color: str
    points: Points
    look: str = "line"


def thinned(points: Points) -> Points:
    """Return at most about `MOST_POINTS` points: the lowest and highest of each interval, so that no spike is lost."""
    size = math.ceil(len(points) / (MOST_POINTS // 2))
    if size <= 2:
        return points
    parts = (points[start : start + size] for start in range(0, len(points), size))
    kept = (sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}) for part in parts)
    return list(itertools.chain.from_iterable(kept))


def ticks(low: float, high: float, count: int = 5, log: bool = False) -> list[float]:
    """Return round numbers between low and high; if `log` powers of ten, or 1, 2 and 5 times these."""
    ticker = load_extra("matplotlib.ticker", "hf", "overcoat report")
    factors = (1.0, 2.0, 5.0) if log and high / low < 100 else (1.0,)
    locator = ticker.LogLocator(subs=factors, numticks=7) if log else ticker.MaxNLocator(count, steps=[1, 2, 5, 10])
    room = 1e-9 * (high - low)  # 3 x 0.2 is above 0.6
    return [float(value) for value in locator.tick_values(low, high) if low - room <= value <= high + room]


def short(value: float, most: float) -> str:
    """Format a number for an axis up to `most`."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if most >= 10 * unit and value:
            return f"{value / unit:.4g}{name}"
    return "0" if abs(value) < 1e-12 else f"{value:.0e}".replace("e-0", "e-") if abs(value) < 1e-3 else f"{value:.4g}"


def chart(
    title: str, unit: str, series: Iterable[Series], *, x_name: str = "step", log: bool = False, zero: bool = False,
    labels: list[str] | None = None, note: str = "", settles: bool = False, top: float = 0.0,
) -> str:  # fmt: skip
    """Return a chart of the finite points, or "" if no series has one.

    Args:
        log: a logarithmic axis where values span a factor of five and more.
        zero: the axis begins at 0.
        settles: the first twentieth of a long line does not widen the axis, and may be outside it.
        labels: names of a step's phases, at x = 0, 1, ...; the axis shows their kinds.
        top: the axis reaches at least this value, as that of the chart beside it.
    """
    known = [one._replace(points=[(x, y) for x, y in one.points if math.isfinite(y)]) for one in series]
    drawn = [one._replace(look="dots") if len(one.points) == 1 else one for one in known if one.points]
    faint = [one for one in drawn if one.look != "faint"] or drawn  # faint lines may be cut off
    values = [y for one in faint for _, y in one.points[_left_out(one, settles) :] if y > 0 or not log]
    if not values:
        return ""
    low, high = (0.0 if zero else min(values)), max(*values, top)
    log = log and low > 0 and high / low >= 5
    if log:
        low, high = low / 1.15, high * 1.15
    else:
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = (low if zero else low - room), high + room
    xs = [x for one in drawn for x, _ in one.points]
    left, right = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 0.5, max(xs) + 0.5)
    if labels is not None:
        left, right = 0.0, float(len(labels))

    def across(x: float) -> float:
        return (x - left) / (right - left)

    def up(y: float) -> float:
        if log:
            return math.log(max(y, 1e-300) / low) / math.log(high / low)
        return (y - low) / (high - low)

    rows = ticks(low, high, log=log)
    columns = ticks(left, right, 4) if labels is None else []
    grid = "".join(f"M0 {SIDE * (1 - up(y)):.1f}H{SIDE}" for y in rows)
    paths = "".join(_path(one, across, up) for one in drawn)
    text = "".join(f'<i class="y" style="top:{100 * (1 - up(y)):.2f}%">{short(y, high)}</i>' for y in rows)
    text += "".join(f'<i class="x" style="left:{100 * across(x):.2f}%">{short(x, right)}</i>' for x in columns)
    kinds = itertools.groupby(range(len(labels or [])), lambda place: kind_of((labels or [])[place]))
    for number, (kind, group) in enumerate(kinds):  # every second one lies lower: narrow phases' would overlap
        places = list(group)
        where = "right:0" if places[-1] + 1 == right else f"left:{100 * across((places[0] + places[-1] + 1) / 2):.2f}%"
        text += f'<i class="x{" low" * (number % 2)}" style="{where}">{kind}</i>'
    shown = [one for one in drawn if one.look != "faint"]
    data = []
    for one in shown:
        points = [[float(f"{value:.6g}") for value in point] for point in thinned(one.points)]
        data.append({"n": one.name, "c": one.color, "look": one.look, "p": points})
    about = json.dumps({"x": [left, right], "name": x_name, "labels": labels, "series": data})
    keys = "".join(
        f'<span class="key {one.look}" style="--c:var(--{one.color})">{html.escape(one.name)}</span>' for one in shown
    )
    aside = f'<p class="note">{html.escape(note)}</p>' if note else ""
    tall = " tall" if labels is not None else ""
    return (
        f'<figure class="chart{tall}"><figcaption>{html.escape(title)} <small>{html.escape(unit)}</small></figcaption>'
        f'<div class="keys">{keys}</div><div class="plot" data-chart="{html.escape(about, quote=True)}">'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img" aria-label="{html.escape(title)}">'
        f'<path class="grid" d="{grid}"/>{paths}</svg>{text}</div>'
        f'<div class="axis">{html.escape(x_name)}</div>{aside}</figure>'
    )


def _left_out(one: Series, settles: bool) -> int:
    return len(one.points) // 20 if settles and len(one.points) >= 100 else 0


def _path(one: Series, across: Callable[[float], float], up: Callable[[float], float]) -> str:
    places = [(SIDE * across(x), SIDE * (1 - min(1.5, max(-0.5, up(y))))) for x, y in thinned(one.points)]
    wide = SIDE * (across(1.0) - across(0.0))  # of a phase: a value from its place to the next one
    if one.look == "dots":
        line = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    elif one.look in ("steps", "area"):
        line = "".join(f"L{x:.1f} {y:.1f}h{wide:.1f}" for x, y in places)
        line = f"M{places[0][0]:.1f} {SIDE}{line}V{SIDE}Z" if one.look == "area" else f"M{line[1:]}"
    else:
        line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path class="{one.look}" style="--c:var(--{one.color})" d="{line}"/>'
