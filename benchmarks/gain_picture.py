"""Draws columns of a table of results over the number of clients, divided by one of them:

python -m benchmarks.gain_picture RESULTS.md PICTURE.svg --base EAGLE-3 --title TITLE COLUMN ...
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

GREY, *COLOURS = "#59636e", "#1f6fd0", "#c4561a", "#1a7f37", "#8250df"
# Text stays text, and the same figures give the same file.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "ssd", "font.family": "sans-serif", "font.size": 9}


def rows(markdown: str, columns: Sequence[str]) -> Iterator[list[float]]:
    """Clients (the first column) and these columns, of the first table that has them all."""
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.M):
        lines = (line.strip("|").split("|") for line in table.splitlines())
        head, _, *body = ([cell.strip() for cell in line] for line in lines)
        if set(columns) <= set(head):
            places = [0, *map(head.index, columns)]
            yield from ([number(cells[place]) for place in places] for cells in body)
            return
    raise ValueError(f"no table has the columns {', '.join(columns)}")


def number(cell: str) -> float:
    """The mean of a cell's figures, without those in brackets; NaN if it has none."""
    found = [*map(float, re.findall(r"\d+(?:\.\d+)?", re.sub(r"\(.*?\)", "", cell)))]
    return sum(found) / len(found) if found else math.nan


def draw(markdown: str, picture: Path, base: str, columns: Sequence[str], title: str) -> None:
    """Write the SVG, with the figures of the first column. The legend is above the lines."""
    import matplotlib.pyplot as plt

    clients, bases, *lines = zip(*rows(markdown, [base, *columns]))
    with plt.rc_context(SVG):
        figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
        for name, values, colour in zip(columns, lines, COLOURS):
            gains = [value / one for value, one in zip(values, bases)]
            axes.plot(clients, gains, "o-", color=colour, label=name)
            for place, gain in zip(clients, gains):
                if name == columns[0] and not math.isnan(gain):
                    where = (place, gain), (4, 6), "data", "offset points"
                    axes.annotate(f"{gain:.2f}", *where, color=colour)
        axes.axhline(1, color=GREY, linestyle=":", label=base)
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, [f"{count:.0f}" for count in clients])
        axes.set(xlabel="clients at the same time", ylim=(0, 1.1 * axes.get_ylim()[1]))
        axes.grid(axis="y", color="#d1d9e0")
        axes.spines[["top", "right", "left"]].set_visible(False)
        figure.suptitle(title)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
        figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="a Markdown file with the table")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--base", required=True, help="the column by which others are divided")
    parser.add_argument("--title", required=True, help="what the figures are")
    parser.add_argument("columns", nargs="+", help="what is drawn")
    args = parser.parse_args()
    draw(args.results.read_text("utf-8"), args.picture, args.base, args.columns, args.title)


if __name__ == "__main__":
    main()
