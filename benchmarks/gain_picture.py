"""Draws the gain over plain vLLM by the number of clients, from a table of results (by matplotlib):

python -m benchmarks.gain_picture benchmarks/results/h200-eagle3.md docs/served.svg
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

PLAIN, SSD = "plain, 1 GPU", "ssd k=7 f=3, 2 GPUs"
EAGLE3 = ("EAGLE-3 k=3, 1 GPU", "EAGLE-3 k=5, 1 GPU")
TITLE = "70B-like stand-in on H200s: output tokens a second, divided by plain vLLM's on one GPU"
GREY, BLUE, ORANGE = "#59636e", "#1f6fd0", "#c4561a"
# Text stays text, and the same figures give the same file.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "ssd", "font.family": "sans-serif", "font.size": 9}


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


def draw(markdown: str, picture: Path) -> None:
    """Write the SVG. EAGLE-3 is shown with the better of its k."""
    import matplotlib.pyplot as plt

    found = list(rows(markdown))
    clients = [int(row["clients"]) for row in found]
    plain = [float(row[PLAIN]) for row in found]
    ssd = [float(row[SSD]) / base for row, base in zip(found, plain)]
    eagle3 = [max(float(row[name]) for name in EAGLE3) / base for row, base in zip(found, plain)]
    with plt.rc_context(SVG):
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        axes.plot(clients, ssd, "o-", color=BLUE, label="SSD, 2 GPUs together")
        for place, gain in zip(clients, ssd):
            axes.annotate(
                f"{gain:.2f}", (place, gain), (4, 6), textcoords="offset points", color=BLUE
            )
        axes.plot(clients, [gain / 2 for gain in ssd], "--", color=BLUE, label="SSD, per GPU")
        label = "EAGLE-3, 1 GPU, acceptance set beforehand"
        axes.plot(clients, eagle3, color=ORANGE, label=label)
        axes.axhline(1, color=GREY, linestyle=":", label="plain vLLM, 1 GPU")
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, [str(number) for number in clients])
        axes.set(title=TITLE, xlabel="clients at the same time", ylim=(0, 1.1 * max(ssd)))
        axes.grid(axis="y", color="#d1d9e0")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="a Markdown file with the table")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    args = parser.parse_args()
    draw(args.results.read_text(encoding="utf-8"), args.picture)


if __name__ == "__main__":
    main()
