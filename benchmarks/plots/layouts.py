"""The pictures in docs/deployment.md: which GPUs have targets, which the draft, how the two meet.

python -m benchmarks.plots.layouts docs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from benchmarks.serving.plots.style import COLOURS, INK, SETTINGS

TARGET, DRAFT = COLOURS["ssd"], COLOURS["ssd-f0"]
_INCHES = 0.78  # a GPU's width, in which all other lengths are given
_TABLE, _BUS = 1.05, 1.75  # heights above the lower edge of a node's GPUs
_BELOW, _ABOVE, _BESIDE = 0.55, 2.3, 0.25  # a node's edges, from its GPUs
_MARGIN = 0.15


@dataclass(frozen=True)
class Part:
    """GPUs side by side that have one engine, the draft, or nothing."""

    name: str
    gpus: int = 1
    colour: str = TARGET


@dataclass(frozen=True)
class Node:
    """A machine. left, top: where its first GPU is drawn."""

    name: str
    parts: tuple[Part, ...]
    left: float = 0.0
    top: float = 0.0

    @property
    def right(self) -> float:
        return self.left + sum(part.gpus for part in self.parts)

    def middles(self, colour: str) -> list[float]:
        """Of the parts of a colour."""
        return [middle for part, middle in self.placed() if part.colour == colour]

    def placed(self) -> Iterator[tuple[Part, float]]:
        """Each part, and its middle."""
        left = self.left
        for part in self.parts:
            yield part, left + part.gpus / 2
            left += part.gpus


_DRAFT = Part("draft", 1, DRAFT)
# By the picture's name. Where the first node has no draft, the second one's is for its engine.
LAYOUTS = {
    "layout-one-server": (Node("one node", (Part("one server, TP 4", 4), _DRAFT)),),
    "layout-seven": (Node("one node", (*(Part(f"server {n}") for n in range(7)), _DRAFT)),),
    "layout-three": (
        Node(
            "one node",
            (*(Part(f"server {n}, TP 2", 2) for n in range(3)), _DRAFT, Part("free", 1, INK)),
        ),
    ),
    "layout-other-node": (
        Node("node A", (Part("one server, TP 8", 8),)),
        Node("node B", (_DRAFT,), left=9.7),
    ),
    "layout-data-parallel": (
        Node("node A", (*(Part(f"engine {n}") for n in range(7)), _DRAFT)),
        Node("node B", (*(Part(f"engine {n}") for n in range(7, 14)), _DRAFT), top=-3.1),
    ),
}


def draw(nodes: Sequence[Node], path: Path) -> None:
    """Write the picture of a layout."""
    left, right = -_BESIDE - _MARGIN, max(node.right for node in nodes) + _BESIDE + _MARGIN
    bottom, top = min(node.top for node in nodes) - _BELOW - _MARGIN, _ABOVE + _MARGIN
    with matplotlib.rc_context({**SETTINGS, "font.size": 9}):
        figure = Figure(figsize=((right - left) * _INCHES, (top - bottom) * _INCHES))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(left, right), ylim=(bottom, top))
        axes.axis("off")
        for node in nodes:
            _draw_node(axes, node)
        if not nodes[0].middles(DRAFT):
            _join(axes, *nodes)
        figure.savefig(path, metadata={"Date": None})


def _draw_node(axes: Axes, node: Node) -> None:
    width, y = node.right - node.left, node.top
    _box(axes, node.left - _BESIDE, y - _BELOW, width + 2 * _BESIDE, _BELOW + _ABOVE, INK)
    axes.text(node.left - 0.1, y + 2.05, node.name, va="center")
    number = 0
    for part, middle in node.placed():
        axes.text(middle, y - 0.27, part.name, color=part.colour, ha="center", va="center")
        left = middle - part.gpus / 2 + 0.06
        for gpu in range(part.gpus):
            _box(axes, left + gpu, y, 0.88, 0.7, part.colour, f"GPU {number}")
            number += 1
        if part.colour == TARGET:
            _box(axes, left, y + _TABLE, part.gpus - 0.12, 0.34, INK, "table")
    engines = node.middles(TARGET)
    for draft in node.middles(DRAFT) if engines else ():
        for middle in engines:
            _line(axes, (middle, middle), (y + _TABLE + 0.34, y + _BUS))
        _line(axes, (engines[0], draft, draft), (y + _BUS, y + _BUS, y + 0.7))
        axes.text(draft, y + _BUS + 0.17, "shared memory", ha="right", va="center")


def _join(axes: Axes, first: Node, second: Node) -> None:
    """A relay beside the first node's table, the draft of the second, and the network between."""
    (draft,) = second.middles(DRAFT)
    left, width, bus = first.right - 1.4, 1.34, _BUS - 0.05
    _box(axes, left, bus - 0.17, width, 0.34, INK, "relay")
    _line(axes, (left + width / 2,) * 2, (_TABLE + 0.34, bus - 0.17))
    _line(axes, (left + width, draft, draft), (bus, bus, 0.7), dashed=True)
    axes.text((first.right + second.left) / 2, bus + 0.17, "network", ha="center", va="center")


def _line(axes: Axes, xs: Sequence[float], ys: Sequence[float], dashed: bool = False) -> None:
    axes.plot(xs, ys, color=INK, linewidth=1.3, linestyle="--" if dashed else "-")


def _box(
    axes: Axes,
    left: float,
    bottom: float,
    width: float,
    height: float,
    colour: str,
    text: str = "",
) -> None:
    """Tinted if it has a colour."""
    tint = 0.0 if colour == INK else 0.15
    box = FancyBboxPatch(
        (left, bottom),
        width,
        height,
        "round,pad=0,rounding_size=0.08",
        facecolor=(*to_rgb(colour), tint),
        edgecolor=colour,
    )
    axes.add_patch(box)
    middle = left + width / 2, bottom + height / 2
    axes.text(*middle, text, color=colour, ha="center", va="center")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write the pictures")
    args = parser.parse_args(arguments)
    for name, nodes in LAYOUTS.items():
        draw(nodes, args.folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
