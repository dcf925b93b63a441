"""Charts as SVG: one panel with labels beside what they name, in the colours of the reader's scheme."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

# By number: remat's, another library's, a third's, a fourth's, no remat. In the light, and in the dark.
_COLOURS = ("#0072b2 #56b4e9", "#b8500b #f08c45", "#007a5a #2cc295", "#9a4f86 #d893c3", "#3c3c3c #d0d0d0")
_WIDE, _HIGH, _FONT, _LETTER = 520, 390, 13.5, 7.2
_LEFT, _TOP, _RIGHT, _FOOT = 58.0, 50.0, 20.0, 46.0
_Box = tuple[float, float, float, float]
# Where no label may be.
_OUTSIDE: tuple[_Box, ...] = (
    (-_WIDE, 0, _LEFT + 2, _HIGH),
    (_WIDE - 2, 0, 2 * _WIDE, _HIGH),
    (-_WIDE, -_HIGH, 2 * _WIDE, _TOP - 6),
    (-_WIDE, _HIGH - _FOOT - 1, 2 * _WIDE, 2 * _HIGH),
)


@dataclass(frozen=True)
class Spot:
    """A point, what stands beside it, and from where to where its x was measured."""

    x: float
    y: float
    label: str = ""
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Points of one colour, by its number.

    Attributes:
        line: whether a line joins them.
        dots: whether they are drawn themselves.
        dashed: of the line.
    """

    spots: Sequence[Spot]
    colour: int = 0
    line: bool = False
    dots: bool = True
    dashed: bool = False


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers between two.

    Example:
        >>> from remat._core.charts import ticks
        >>> ticks(0, 33.4)
        [0.0, 10.0, 20.0, 30.0]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = power * next(n for n in (1, 2, 5, 10) if (high - low) / (power * n) <= 5.5)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def chart(
    title: str, x: str, y: str, series: Sequence[Series], *, zero: tuple[bool, bool] = (True, True)
) -> str:
    """The SVG of points and lines; `zero`: whether the axes of x and y begin at 0."""
    spots = [spot for one in series for spot in one.spots]
    ends = [end for spot in spots for end in (spot.spread or (spot.x, spot.x))]
    (x0, x1), (y0, y1) = _range(ends, zero[0]), _range([spot.y for spot in spots], zero[1])

    # Lines are named at their ends.
    right = _RIGHT + _LETTER * max((len(one.spots[-1].label) for one in series if one.line), default=0)

    def at(spot: Spot) -> tuple[float, float]:
        return _across(spot.x), _HIGH - _FOOT - (spot.y - y0) / (y1 - y0) * (_HIGH - _FOOT - _TOP)

    def _across(value: float) -> float:
        return _LEFT + (value - x0) / (x1 - x0) * (_WIDE - _LEFT - right)

    ground = _HIGH - _FOOT
    parts = [f'<path class="axis" d="M{_LEFT} {_TOP}V{ground}H{_WIDE - right}"/>']
    for value in ticks(x0, x1):
        parts.append(_text(f"{value:,.6g}", _across(value), ground + 18, "middle"))
        parts.append(f'<path class="axis" d="M{_across(value):.1f} {ground}v4"/>')
    for value in ticks(y0, y1):
        up = at(Spot(x0, value))[1]
        parts.append(_text(f"{value:,.6g}", _LEFT - 8, up + 4.5, "end"))
        parts.append(f'<path class="grid" d="M{_LEFT} {up:.1f}H{_WIDE - right}"/>')
    parts += [_text(x, _WIDE - right, _HIGH - 8, "end"), _text(y, 8, 40)]
    for one in series:
        colour, places = f"c{one.colour}", [at(spot) for spot in one.spots]
        if one.line:
            dashes = ' stroke-dasharray="6 4"' if one.dashed else ""
            path = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
            parts.append(f'<path class="{colour} line" d="M{path}"{dashes}/>')
        for spot, (a, b) in zip(one.spots, places, strict=True):
            if spot.spread:
                low, high = map(_across, spot.spread)
                parts.append(f'<path class="{colour} line thin" d="M{low:.1f} {b:.1f}H{high:.1f}"/>')
            if one.dots:
                parts.append(f'<circle class="{colour}" cx="{a:.1f}" cy="{b:.1f}" r="4.5"/>')
    spreads = [
        (_across(s.spread[0]), at(s)[1] - 1, _across(s.spread[1]), at(s)[1] + 1) for s in spots if s.spread
    ]
    return _svg(title, [*parts, *_labels(series, at, spreads)], _WIDE, _HIGH)


def bars(title: str, rows: Sequence[tuple[str, float, str, int]]) -> str:
    """The SVG of one bar a row: a name, a length, what stands at its end, and the colour's number."""
    most, wide = max(length for _, length, _, _ in rows) or 1, 420
    name = max(len(row[0]) for row in rows) * 1.1 * _LETTER + 16
    room = wide - name - max(len(row[2]) for row in rows) * 1.1 * _LETTER - 16
    parts = []
    for i, (text, length, end, colour) in enumerate(rows):
        up, bar = 52 + 28 * i, max(1.5, room * length / most)
        parts.append(f'<rect class="c{colour}" x="{name:.1f}" y="{up - 14}" width="{bar:.1f}" height="19"/>')
        parts += [_text(text, name - 8, up, "end"), _text(end, name + bar + 6, up)]
    return _svg(title, parts, wide, 48 + 28 * len(rows))


def _range(values: Sequence[float], zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return (min(0.0, low) if zero else low - room), high + room


def _text(text: str, x: float, y: float, anchor: str = "", style: str = "") -> str:
    end = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{end}{style}>{escape(text)}</text>'


def _labels(
    series: Sequence[Series], at: Callable[[Spot], tuple[float, float]], taken: list[_Box]
) -> Iterator[str]:
    """Each label where it meets least of all else around its point, the first such place."""
    places = [(one, spot, *at(spot)) for one in series for spot in one.spots]
    taken = [*taken, *_OUTSIDE]
    taken += [(a - 6, b - 6, a + 6, b + 6) for one, _, a, b in places if one.dots]
    # (A line is as many small boxes.)
    for one in series:
        for (a, b), (c, d) in itertools.pairwise([at(spot) for spot in one.spots] if one.line else []):
            steps = max(1, int(math.hypot(c - a, d - b) / 6))
            for n in range(steps):
                p, q = a + (c - a) * n / steps, b + (d - b) * n / steps
                taken.append((p - 2, q - 2, p + 2, q + 2))
    for one, spot, a, b in places:
        if not spot.label:
            continue
        wide = len(spot.label) * _LETTER
        boxes = [(left, b + up - 11, left + wide, b + up + 4) for up, left in _around(a, wide)]
        # A label far away is worth less than one that touches a line.
        best = min(boxes, key=lambda box: abs(box[3] - 8 - b) / 2 + sum(_meet(box, other) for other in taken))
        taken.append(best)
        yield _text(spot.label, best[0], best[3] - 4, style=f' class="c{one.colour}"')


def _around(a: float, wide: float) -> Iterator[tuple[float, float]]:
    for up in (4, *(4 + side * 14 * n for n in range(1, 14) for side in (-1, 1))):
        yield from ((up, a + 8), (up, a - 8 - wide), (up, a - wide / 2))


def _meet(one: _Box, other: _Box) -> float:
    """The area that two boxes share."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    return max(0, across) * max(0, min(one[3], other[3]) - max(one[1], other[1]))


def _svg(title: str, parts: Sequence[str], wide: float, high: float) -> str:
    light, dark = zip(*(pair.split() for pair in _COLOURS), strict=True)

    def scheme(ground: str, ink: str, grid: str, colours: Sequence[str]) -> str:
        rules = [f".ground{{fill:{ground}}}text{{fill:{ink}}}.axis{{stroke:{ink}}}.grid{{stroke:{grid}}}"]
        rules += [f".c{i}{{fill:{c}}}.c{i}.line{{fill:none;stroke:{c}}}" for i, c in enumerate(colours)]
        return "".join(rules)

    style = f"text{{font:{_FONT}px system-ui,sans-serif}}.axis{{fill:none}}"
    style += f".line{{stroke-width:2}}.thin{{stroke-width:1}}{scheme('#fff', '#1c1c1c', '#e4e4e4', light)}"
    style += f"@media(prefers-color-scheme:dark){{{scheme('#1b1c20', '#e4e4e4', '#3a3b40', dark)}}}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">'
    head += f"<title>{escape(title)}</title><style>{style}</style>"
    ground = f'<rect class="ground" width="{wide}" height="{high}" rx="4"/>'
    # A long title is smaller: it is never cut.
    size = _FONT * min(1.0, (wide - 16) / (len(title) * 1.12 * _LETTER))
    line = _text(title, 8, 20, style=f' style="font-size:{size:.1f}px;font-weight:600"')
    return "\n".join([head + ground, line, *parts, "</svg>\n"])
