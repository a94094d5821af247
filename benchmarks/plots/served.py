"""The picture in README.md, from the table of a served run:

python -m benchmarks.plots.served benchmarks/results/h200-served.md docs/served.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

PLAIN, SSD = "#8a8f98", "#e8743b"  # both can be told from white and from black
TEXT = "#7d8590"


@dataclass(frozen=True)
class Load:
    """One row: clients at the same time, and output tokens a second without and with ssd."""

    clients: int
    plain: float
    ssd: float


def read_table(markdown: str) -> list[Load]:
    """The rows of the first table with the columns clients, plain tokens/s and ssd tokens/s;
    ``ValueError`` if there is none."""
    columns: list[str] = []
    loads: list[Load] = []
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            if loads:
                break
            columns = []
        elif {"clients", "plain tokens/s", "ssd tokens/s"} <= set(cells):
            columns = cells
        elif columns and not set(line) <= set("|- :"):
            row = dict(zip(columns, cells))
            plain, ssd = float(row["plain tokens/s"]), float(row["ssd tokens/s"])
            loads.append(Load(int(row["clients"]), plain, ssd))
    if not loads:
        raise ValueError("no table has the columns clients, plain tokens/s and ssd tokens/s")
    return loads


def draw(loads: Sequence[Load], path: Path) -> None:
    """Write the picture: two lines over the clients, and above ssd's by what it is more."""
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), TEXT)
    ticks = dict.fromkeys(("xtick.color", "ytick.color"), TEXT)
    # A fixed salt: the same table makes the same file.
    settings: dict[Any, Any] = {
        **colours,
        **ticks,
        "svg.hashsalt": "served",
        "svg.fonttype": "none",
    }
    clients = [load.clients for load in loads]
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(7.2, 3.4))
        axes.plot(clients, [load.ssd for load in loads], "o-", color=SSD, label="with SSD")
        axes.plot(clients, [load.plain for load in loads], "o-", color=PLAIN, label="plain vLLM")
        for load in loads:
            axes.annotate(
                f"{load.ssd / load.plain:.1f}×",
                (load.clients, load.ssd),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                color=SSD,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(top=2 * max(load.ssd for load in loads))
        axes.set_xticks(clients, [str(number) for number in clients])
        axes.set_xlabel("clients at the same time")
        axes.set_ylabel("output tokens/s")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
        figure.tight_layout()
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


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
