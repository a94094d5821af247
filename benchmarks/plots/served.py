"""The picture in docs/tuning.md, from the table of a served run:

python -m benchmarks.plots.served benchmarks/results/h200-eagle3.md docs/served.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.plots.style import COLOURS, plot

_CLIENTS, _PLAIN, _SSD = "clients", "plain, 1 GPU", "ssd k=7 f=3, 2 GPUs"
_EAGLE3 = ("EAGLE-3 k=3, 1 GPU", "EAGLE-3 k=5, 1 GPU")
TITLE = "70B-like stand-in on H200: tokens/s as a multiple of plain vLLM on one GPU"


@dataclass(frozen=True)
class Load:
    """One row: clients at the same time, and output tokens a second of each side. eagle3: with the
    better of its k. ssd: of two GPUs together."""

    clients: int
    plain: float
    eagle3: float
    ssd: float


def read_table(markdown: str) -> list[Load]:
    """The rows of the first table with all columns; ``ValueError`` if there is none."""
    columns: list[str] = []
    loads: list[Load] = []
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            if loads:
                break
            columns = []
        elif {_CLIENTS, _PLAIN, _SSD, *_EAGLE3} <= set(cells):
            columns = cells
        elif columns and not set(line) <= set("|- :"):
            row = dict(zip(columns, cells))
            eagle3 = max(float(row[name]) for name in _EAGLE3)
            loads.append(Load(int(row[_CLIENTS]), float(row[_PLAIN]), eagle3, float(row[_SSD])))
    if not loads:
        raise ValueError(f"no table has the columns {_PLAIN}, {_SSD} and those of EAGLE-3")
    return loads


def draw(loads: Sequence[Load], path: Path) -> None:
    """Write the picture: gains over the clients, of ssd in all and per GPU, and of EAGLE-3."""
    clients = [load.clients for load in loads]
    with plot(path, TITLE, "clients at the same time", "x plain vLLM") as axes:
        for label, colour, dashes, gains in (
            ("SSD, 2 GPUs together", COLOURS["ssd"], "-", [x.ssd / x.plain for x in loads]),
            ("SSD per GPU", COLOURS["ssd"], "--", [x.ssd / x.plain / 2 for x in loads]),
            ("EAGLE-3, 1 GPU", COLOURS["eagle3"], "-", [x.eagle3 / x.plain for x in loads]),
            ("plain vLLM, 1 GPU", COLOURS["plain"], ":", [1.0 for _ in loads]),
        ):
            axes.plot(clients, gains, f"o{dashes}", color=colour, label=label)
        for load in loads:
            axes.annotate(
                f"{load.ssd / load.plain:.2f}",
                (load.clients, load.ssd / load.plain),
                xytext=(6, 6),
                textcoords="offset points",
                color=COLOURS["ssd"],
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, [str(number) for number in clients])
        axes.set_ylim(0, 1.15 * max(load.ssd / load.plain for load in loads))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="a Markdown file with the table")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    args = parser.parse_args()
    draw(read_table(args.results.read_text(encoding="utf-8")), args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
