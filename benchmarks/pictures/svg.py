"""Plots as SVG, on a white card, so that a dark page shows them, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

INK, GREY, PALE = "#1f2328", "#59636e", "#d1d9e0"
BLUE, ORANGE, GREEN, RED, AMBER, PURPLE = (
    *("#1f6fd0", "#c4561a", "#1a7f37", "#cf222e", "#b08800", "#8250df"),
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 24, 48, 22  # from a plot's edges to its axes, pixels
_LETTER = 6.3  # pixels, in the mean


@dataclass(frozen=True)
class Line:
    """points: (x, y), from left to right; NaN is a gap. labelled: with a dot and a figure each."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashes: str = "none"
    labelled: bool = False


@dataclass(frozen=True)
class Axes:
    """One plot. Its edges are in pixels. ticks: places on the x axis, and their texts. Without a
    legend there is one line, which the title names. grid: lines above the x axis."""

    left: float
    top: float
    width: float
    height: float
    title: str
    lines: Sequence[Line]
    ticks: Sequence[tuple[float, str]]
    legend: bool = True
    grid: int = 2

    def draw(self) -> list[str]:
        """The elements."""
        highest = nice_top(
            max((y for line in self.lines for _, y in line.points if not math.isnan(y)), default=0)
        )
        parts = [text(self.left + 4, self.top + 14, self.title, weight=600)]
        for number in range(self.grid + 1):
            share = number / self.grid
            y = self._y(share)
            right = self.left + self.width - _RIGHT
            parts.append(
                f'<path d="M{self.left + _LEFT:.0f} {y:.1f}H{right:.0f}" stroke="{PALE}"/>'
            )
            parts.append(text(self.left + _LEFT - 6, y + 4, f"{share * highest:g}", GREY, "end"))
        for place, label in self.ticks:
            parts.append(text(self._x(place), self._y(0) + 16, label, GREY, "middle"))
        for line in self.lines:
            parts += self._line(line, highest)
        return parts + (self._legend() if self.legend else [])

    def _line(self, line: Line, highest: float) -> list[str]:
        """A path, begun anew after each gap; dots and figures where wanted."""
        steps, after_gap, parts = "", True, []
        for place, value in line.points:
            if not math.isnan(value):
                x, y = self._x(place), self._y(value / highest)
                steps += f"{'M' if after_gap else 'L'}{x:.1f} {y:.1f}"
                if line.labelled:
                    parts.append(
                        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"/>'
                    )
                    parts.append(text(x + 5, y - 7, f"{value:.2f}", line.colour))
            after_gap = math.isnan(value)
        stroke = f'stroke="{line.colour}" stroke-width="1.8" stroke-dasharray="{line.dashes}"'
        return [f'<path d="{steps}" fill="none" {stroke}/>', *parts]

    def _legend(self) -> list[str]:
        """In a line below the title."""
        parts, left, y = [], self.left + 4.0, self.top + 30
        for line in self.lines:
            stroke = f'stroke="{line.colour}" stroke-width="2.5" stroke-dasharray="{line.dashes}"'
            parts.append(f'<path d="M{left:.0f} {y - 4:.0f}h18" {stroke}/>')
            parts.append(text(left + 23, y, line.label))
            left += 38 + _LETTER * len(line.label)
        return parts

    def _x(self, place: float) -> float:
        first, last = self.ticks[0][0], self.ticks[-1][0]
        room = self.width - _LEFT - _RIGHT
        return self.left + _LEFT + room * (place - first) / (last - first)

    def _y(self, share: float) -> float:
        return self.top + _TOP + (self.height - _TOP - _BOTTOM) * (1 - share)


def nice_top(value: float) -> float:
    """The least of 1, 2, 4, 5, 6, 8 and 10 times a power of ten that is not below a value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 2, 4, 5, 6, 8, 10) if n * power >= value * (1 - 1e-9))


def text(
    x: float,
    y: float,
    words: str,
    colour: str = INK,
    anchor: str = "start",
    weight: int = 400,
    size: int = 12,
) -> str:
    """A line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}" font-size="{size}">{escape(words)}</text>'
    )


def picture(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """The file: a card with ``parts``, in pixels. title: for those who cannot see it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" '
        'role="img" aria-labelledby="title">'
    )
    card = f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, f'<title id="title">{escape(title)}</title>', card, *parts, "</svg>\n"])
