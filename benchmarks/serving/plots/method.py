"""The method at a glance: what target and draft do at the same time; the draft's step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.serving.plots.style import COLOURS, INK, plot
from benchmarks.serving.records import Moment, Work

_ROUNDS = 8  # shown
_LANES: dict[Work, int] = {
    "verify": 1,
    "wait": 1,
    "prefill": 0,
    "fallback": 0,
    "glue": 0,
    "branch": 0,
}
_FILLS: dict[Work, tuple[str, str]] = {
    "verify": (COLOURS["ssd"], "target verifies a round"),
    "wait": ("none", "target waits for drafts"),
    "prefill": (COLOURS["ngram"], "draft reads the prompt"),
    "fallback": (COLOURS["eagle3"], "draft drafts again, for an outcome not predicted"),
    "glue": (COLOURS["draft_model"], "draft takes in the outcome and predicts the next ones"),
    "branch": (COLOURS["ssd-f0"], "draft grows all branches by a token"),
}


def timeline(moments: Sequence[Moment], name: str, path: Path) -> None:
    """Some rounds in the middle of a request, with what became of each. name: of the side."""
    rounds = [moment for moment in moments if moment.work == "verify"]
    middle = max(0, len(rounds) // 2 - _ROUNDS // 2)
    shown = rounds[middle : middle + _ROUNDS]
    if not shown:
        raise ValueError(f"the timeline of {name} has no rounds")
    begin, end = shown[0].begin, shown[-1].end
    with plot(path, f"One request, {name}", "ms", "") as axes:
        drawn = [m for m in moments if begin <= m.begin and m.end <= end]
        for moment in drawn:
            _bar(axes, moment, begin)
        for moment in shown:
            axes.text(moment.end - begin, 1.45, moment.ended, ha="center", va="bottom")
            axes.plot([moment.end - begin] * 2, [-0.4, 1.4], color=INK, linewidth=1, linestyle=":")
        works = [work for work in _FILLS if any(m.work == work for m in drawn)]
        fills = [Patch(**_look(work)) for work in works]
        labels = [_FILLS[work][1] for work in works]
        axes.figure.legend(fills, labels, loc="outside lower center", ncols=2, fontsize="small")
        axes.set_yticks([0, 1], ["draft", "target"])
        axes.set_ylim(-0.5, 1.7)
        axes.grid(False)


def _bar(axes: Axes, moment: Moment, begin: float) -> None:
    left, width = moment.begin - begin, moment.end - moment.begin
    axes.barh(_LANES[moment.work], width, 0.7, left, linewidth=0.5, **_look(moment.work))


def _look(work: Work) -> dict[str, Any]:
    return {"facecolor": _FILLS[work][0], "edgecolor": INK, "hatch": "//" * (work == "wait")}


def draft_step(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    """A step of the draft beside what reading the weights and the KV takes. rows: as
    `benchmarks.draft_round` saves them."""
    title = "A step of the draft, and its floor: weights and KV read once"
    with plot(path, title, "requests, and tokens of their texts", "ms") as axes:
        names = [f"{row['batch']:g} x {row['context']:g}" for row in rows]
        steps = [row["step_us"] / 1000 for row in rows]
        floors = [row["floor_us"] / 1000 for row in rows]
        axes.bar(names, steps, 0.6, color=COLOURS["ssd-f0"], label="step")
        axes.bar(names, floors, 0.6, color="none", edgecolor=INK, hatch="//", label="floor")
        for place, row in enumerate(rows):
            axes.text(place, steps[place], f"{row['step/floor']:.1f} x", ha="center", va="bottom")
