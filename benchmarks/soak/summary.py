"""What a soak comes to: figures, a verdict, and both as text."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from benchmarks.common.markdown import table_row
from benchmarks.soak.load import Outcome
from benchmarks.soak.watch import Sample

PARTS = 4
_EXAMPLES = 10  # of what went wrong; more are in the JSON file
_MEANS = (
    "target_mib",
    "draft_mib",
    "ray_mib",
    "gpu_mib",
    "open_files",
    "shared_files",
)


class Part(msgspec.Struct, frozen=True):
    """One of the equal parts of the time under load. hit, miss, late: shares of its rounds, None
    without any; the others of `_MEANS`, as in `Sample`."""

    tokens_per_s: float
    hit: float | None
    miss: float | None
    late: float | None
    target_mib: float
    draft_mib: float
    ray_mib: float
    gpu_mib: float | None
    open_files: float
    shared_files: float


class Summary(msgspec.Struct, frozen=True):
    """seconds: under load. longest_gap: between two tokens of a request while another got some.
    longest_start: until a request's first token. harm: what was done to the draft; harmed_at: when,
    in seconds. died: times that a draft was lost and had not been killed. draft_back: whether a
    draft server was there at the end. problems: why the soak has failed."""

    seconds: float
    tokens: int
    finished: int
    aborted: int
    failures: list[str]
    compared: int
    differences: list[str]
    longest_gap: float
    longest_start: float
    harm: str
    harmed_at: list[float]
    died: int
    draft_back: bool
    parts: list[Part]
    leftovers: list[str]
    problems: list[str]


def summarise(
    outcome: Outcome,
    samples: Sequence[Sample],
    harm: str,
    harmed_at: Sequence[float],
    died: int,
    draft_back: bool,
    leftovers: Sequence[str],
    compare_required: bool,
) -> Summary:
    """The figures of a soak, and what of them is a failure."""
    flow = outcome.flow
    problems = []
    if outcome.failures:
        problems.append(f"{len(outcome.failures)} requests failed")
    if not outcome.compared:
        problems.append("no greedy text was compared")
    if outcome.differences and compare_required:
        problems.append(f"{len(outcome.differences)} greedy texts are not the plain server's")
    if died:
        problems.append(f"a draft died by itself, {died} times")
    if leftovers:
        problems.append("something is left after the end")
    return Summary(
        seconds=samples[-1].at - samples[0].at,
        tokens=flow.tokens,
        finished=outcome.finished,
        aborted=outcome.aborted,
        failures=outcome.failures,
        compared=outcome.compared,
        differences=outcome.differences,
        longest_gap=flow.longest_gap,
        longest_start=flow.longest_start,
        harm=harm,
        harmed_at=list(harmed_at),
        died=died,
        draft_back=draft_back,
        parts=_parts(samples),
        leftovers=list(leftovers),
        problems=problems,
    )


def _parts(samples: Sequence[Sample]) -> list[Part]:
    """`PARTS` parts with equal numbers of samples, or fewer parts if there are too few samples.
    Consecutive parts share one sample, so that nothing is left out."""
    steps = len(samples) - 1
    ends = [number * steps // PARTS for number in range(PARTS + 1)]
    return [_part(samples[a : b + 1]) for a, b in pairwise(ends) if b > a]


def _part(samples: Sequence[Sample]) -> Part:
    first, last = samples[0], samples[-1]
    rounds = last.rounds - first.rounds

    def share(name: str) -> float | None:
        counted: int = getattr(last, name) - getattr(first, name)
        return counted / rounds if rounds else None

    def mean(name: str) -> Any:
        values = [getattr(sample, name) for sample in samples]
        return None if None in values else sum(values) / len(values)

    return Part(
        tokens_per_s=(last.tokens - first.tokens) / (last.at - first.at),
        hit=share("hits"),
        miss=share("misses"),
        late=share("late"),
        **{name: mean(name) for name in _MEANS},
    )


def markdown(summary: Summary) -> str:
    """Two tables: of the whole, and of its parts; then what went wrong."""
    rows = {
        "under load": f"{summary.seconds:.0f} s, {summary.tokens} tokens",
        "requests finished / aborted / failed": (
            f"{summary.finished} / {summary.aborted} / {len(summary.failures)}"
        ),
        "greedy texts compared / different": f"{summary.compared} / {len(summary.differences)}",
        "longest gap between tokens while others got some": f"{summary.longest_gap:.2f} s",
        "longest wait for a first token": f"{summary.longest_start:.2f} s",
        f"draft {summary.harm}": _harm(summary),
        "left after the end": str(len(summary.leftovers)),
        "verdict": "; ".join(summary.problems) or "good",
    }
    lines = [["", ""], ["---"] * 2, *([name, text] for name, text in rows.items())]
    text = [table_row(cells) for cells in lines]
    text += ["", *map(table_row, _by_parts(summary.parts))]
    for name in ("failures", "differences", "leftovers"):
        found = getattr(summary, name)
        text += ["", f"{name}:", *(f"* {line}" for line in found[:_EXAMPLES])] if found else []
    return "\n".join(text)


def _harm(summary: Summary) -> str:
    if not summary.harmed_at:
        return "never"
    times = ", ".join(f"{at:.0f}" for at in summary.harmed_at)
    after = "there at the end" if summary.draft_back else "not there at the end"
    return f"{len(summary.harmed_at)} times (after {times} s), {after}"


def _by_parts(parts: Sequence[Part]) -> list[list[str]]:
    def shares(part: Part) -> str:
        return " / ".join(
            "–" if s is None else f"{s:.0%}" for s in (part.hit, part.miss, part.late)
        )

    def number(name: str) -> Callable[[Part], str]:
        def show(part: Part) -> str:
            value = getattr(part, name)
            return "–" if value is None else f"{value:.1f}"

        return show

    columns: dict[str, Callable[[Part], str]] = {
        "tokens/s": number("tokens_per_s"),
        "hit / miss / late": shares,
        "target MiB": number("target_mib"),
        "draft MiB": number("draft_mib"),
        "keeper and Ray MiB": number("ray_mib"),
        "GPU MiB": number("gpu_mib"),
        "open files": number("open_files"),
        "shared files": number("shared_files"),
    }
    drift = ["last - first", "", ""]
    for name in _MEANS:
        first, last = getattr(parts[0], name), getattr(parts[-1], name)
        drift.append("–" if first is None or last is None else f"{last - first:+.1f}")
    return [
        ["part", *columns],
        ["---"] * (len(columns) + 1),
        *([str(n), *(show(part) for show in columns.values())] for n, part in enumerate(parts, 1)),
        drift,
    ]
