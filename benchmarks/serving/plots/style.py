"""How plots look: SVG without a background, in colours that a light and a dark page both show."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.serving.records import Kind, Side

# A contrast of at least 3 to white and to black.
INK = "#808080"
COLOURS: dict[Kind, str] = {
    "plain": INK,
    "draft_model": "#b8860b",
    "ngram": "#9a6ddb",
    "eagle3": "#d9652b",
    "ssd-f0": "#2e9e4f",
    "ssd": "#2f7fe0",
    "ssd-quantised": "#d2569f",
}
_STYLES = ("-", "--", ":", "-.")
SETTINGS: Any = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.figsize": (8.0, 4.5),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.size": 11,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2,
    "savefig.transparent": True,
    "svg.fonttype": "none",  # text remains text
    "svg.hashsalt": "benchmarks",  # the same file for the same figures
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextmanager
def plot(path: Path, title: str, x: str, y: str) -> Iterator[Axes]:
    """Axes with a title and the names of the axes, units included; the file ``path`` once they are
    filled."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(layout="constrained")
        axes = figure.add_subplot()
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.title.set_fontsize("medium")
        yield axes
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        figure.savefig(path, metadata={"Date": None})


def look(side: Side, sides: Sequence[Side]) -> dict[str, Any]:
    """Arguments of a side's line: a colour for its kind, a style among those of its kind."""
    same = [other.name for other in sides if other.kind == side.kind]
    style = _STYLES[same.index(side.name) % len(_STYLES)]
    return {"color": COLOURS[side.kind], "linestyle": style, "label": side.name}
