"""A tuning as a picture: bars of every candidate, by the number of clients."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from vllm_ssd.tune.records import Outcome, speedup
from vllm_ssd.tune.report import plain_of

_INCHES_PER_BAR = 0.28


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write an SVG file: tokens a second as a multiple of plain vLLM's, the best candidate at the
    top. outcomes: plain vLLM's among them; those that failed are left out."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    plain = plain_of(outcomes)
    shown = [outcome for outcome in outcomes if outcome.error is None]
    shown.sort(key=lambda outcome: speedup(outcome, plain))
    groups = len(plain.figures)
    figure = Figure(figsize=(8, 1.5 + _INCHES_PER_BAR * groups * len(shown)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / groups
    for group, theirs in enumerate(plain.figures):
        axes.barh(
            [row + (group - (groups - 1) / 2) * -height for row in range(len(shown))],
            [each.figures[group].tokens_per_s / theirs.tokens_per_s for each in shown],
            height,
            label=f"{theirs.clients} at once",
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [each.candidate.name for each in shown])
    axes.set_xlabel("tokens/s, as a multiple of plain vLLM's")
    axes.legend()
    with rc_context({"svg.fonttype": "none"}):  # words are words, which can be searched
        figure.savefig(path, format="svg")
