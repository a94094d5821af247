"""A plot as SVG, on a white card, so that a dark page shows it, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

INK, GREY, PALE = "#1f2328", "#59636e", "#d1d9e0"
BLUE, ORANGE = "#1f6fd0", "#c4561a"
# Pixels: the card, and from the card's edges to the axes.
_WIDTH, _HEIGHT = 760, 388
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 724, 56, 342
_LETTER = 6.3  # pixels, in the mean
_GRID = 5  # lines above the x axis


@dataclass(frozen=True)
class Line:
    """points: (x, y), from left to right. labelled: with a dot and a figure each."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashes: str = "none"
    labelled: bool = False


def plot(title: str, axis: str, lines: Sequence[Line], ticks: Sequence[tuple[float, str]]) -> str:
    """The file. axis: what the x axis is. ticks: places on the x axis, and their texts; the first
    and the last are its ends."""
    first, last = ticks[0][0], ticks[-1][0]
    highest = nice_top(max(y for line in lines for _, y in line.points))

    def to_x(place: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (place - first) / (last - first)

    def to_y(share: float) -> float:
        return _TOP + (_BOTTOM - _TOP) * (1 - share)

    parts = [_text(8, 22, title, weight=600)]
    for number in range(_GRID + 1):
        share = number / _GRID
        y = to_y(share)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="{PALE}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{share * highest:g}", GREY, "end"))
    parts += [_text(to_x(place), to_y(0) + 16, label, GREY, "middle") for place, label in ticks]
    for line in lines:
        points = [(to_x(place), to_y(value / highest), value) for place, value in line.points]
        steps = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in points)
        stroke = f'stroke="{line.colour}" stroke-width="1.8" stroke-dasharray="{line.dashes}"'
        parts.append(f'<path d="{steps}" fill="none" {stroke}/>')
        for x, y, value in points if line.labelled else ():
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"/>')
            parts.append(_text(x + 5, y - 7, f"{value:.2f}", line.colour))
    left, y = 8.0, 38
    for line in lines:
        stroke = f'stroke="{line.colour}" stroke-width="2.5" stroke-dasharray="{line.dashes}"'
        parts.append(f'<path d="M{left:.0f} {y - 4:.0f}h18" {stroke}/>')
        parts.append(_text(left + 23, y, line.label))
        left += 38 + _LETTER * len(line.label)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="Helvetica, Arial, sans-serif" '
        'role="img" aria-labelledby="title">'
    )
    card = f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#ffffff"/>'
    below = _text(_WIDTH / 2, _HEIGHT - 10, axis, GREY, "middle")
    return "\n".join(
        [head, f'<title id="title">{escape(title)}</title>', card, *parts, below, "</svg>\n"]
    )


def nice_top(value: float) -> float:
    """The least of 1, 2, 4, 5, 6, 8 and 10 times a power of ten that is not below a value above
    0."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 2, 4, 5, 6, 8, 10) if n * power >= value * (1 - 1e-9))


def _text(
    x: float, y: float, words: str, colour: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    """A line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}" font-size="12">{escape(words)}</text>'
    )
