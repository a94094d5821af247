"""The gain over plain vLLM by the number of clients, from a table of results:

python -m benchmarks.pictures.gain benchmarks/results/h200-eagle3.md docs/served.svg
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.pictures.svg import BLUE, GREY, ORANGE, Line, plot

PLAIN, SSD = "plain, 1 GPU", "ssd k=7 f=3, 2 GPUs"
EAGLE3 = ("EAGLE-3 k=3, 1 GPU", "EAGLE-3 k=5, 1 GPU")
TITLE = "70B-like stand-in on H200s: output tokens a second, divided by plain vLLM's on one GPU"


def rows(markdown: str) -> Iterator[dict[str, str]]:
    """The rows of the first table that has all columns. Raises ValueError if there is none."""
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.M):
        head, _, *body = (
            [cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()
        )
        if {"clients", PLAIN, SSD, *EAGLE3} <= set(head):
            yield from (dict(zip(head, cells)) for cells in body)
            return
    raise ValueError(f"no table has the columns clients, {PLAIN}, {SSD} and {', '.join(EAGLE3)}")


def draw(markdown: str) -> str:
    """The picture. EAGLE-3 is shown with the better of its k."""
    clients, ssd, eagle3 = [], [], []
    for row in rows(markdown):
        plain = float(row[PLAIN])
        clients.append(int(row["clients"]))
        ssd.append(float(row[SSD]) / plain)
        eagle3.append(max(float(row[name]) for name in EAGLE3) / plain)
    places = [math.log2(number) for number in clients]
    lines = [
        Line("SSD, 2 GPUs together", BLUE, list(zip(places, ssd)), labelled=True),
        Line("SSD, per GPU", BLUE, [(x, y / 2) for x, y in zip(places, ssd)], "6 4"),
        Line("EAGLE-3, 1 GPU, acceptance set beforehand", ORANGE, list(zip(places, eagle3))),
        Line("plain vLLM, 1 GPU", GREY, [(x, 1.0) for x in places], "2 3"),
    ]
    ticks = [(place, str(number)) for place, number in zip(places, clients)]
    return plot(TITLE, "clients at the same time", lines, ticks)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="a Markdown file with the table")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    args = parser.parse_args()
    args.picture.write_text(draw(args.results.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
