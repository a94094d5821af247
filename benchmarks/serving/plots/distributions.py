"""How times to the first token and between messages are distributed."""

from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.serving.plots.style import look, plot
from benchmarks.serving.records import Load, Run, Saved

_TITLES = {
    "ttfts_ms": "Time to the first token",
    "itls_ms": "Time between two messages with tokens",
}
Times = Literal["ttfts_ms", "itls_ms"]


def distribution(saved: Saved, times: Times, load: Load, path: Path) -> None:
    """Of all requests of a load, the share that took at most so long, by side."""
    sides = [result.side for result in saved.results]
    with plot(path, f"{_TITLES[times]}: {_words(load)}", "ms", "share of times") as axes:
        for result in saved.results:
            for run in result.runs:
                values = np.sort(getattr(run.seen, times))
                if run.load == load and len(values):
                    shares = np.arange(1, len(values) + 1) / len(values)
                    axes.step(values, shares, where="post", **look(result.side, sides))
        axes.set_ylim(0, 1)
        if axes.has_data():
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())


def told_by(runs: list[Run]) -> list[Load]:
    """Loads whose client told single times."""
    return list(dict.fromkeys(run.load for run in runs if run.seen.ttfts_ms))


def _words(load: Load) -> str:
    if load.rate is not None:
        return f"{load.rate:g} requests/s"
    return f"{load.concurrency or load.requests} at a time"
