"""What a soak comes to: figures, a verdict, and both as text."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from benchmarks.common.markdown import table_head, table_row
from benchmarks.soak.load import Outcome
from benchmarks.soak.watch import Sample

PARTS = 4
_EXAMPLES = 10  # of what went wrong; more are in the JSON file
_MEANS = ("target_mib", "draft_mib", "ray_mib", "gpu_mib", "open_files", "shared_files")
_SHARES = ("hits", "misses", "late")
_COUNTED = ("finished", "aborted", "failures", "compared", "differences")
_OF_FLOW = ("tokens", "longest_gap", "longest_start")
# Figures of one of the equal parts of the time under load, by name: shares of its rounds for
# `_SHARES`, means for `_MEANS`. None: there is no such figure.
Part = dict[str, float | None]


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
        **{name: getattr(outcome, name) for name in _COUNTED},
        **{name: getattr(outcome.flow, name) for name in _OF_FLOW},
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
    part: Part = {"tokens_per_s": (last.tokens - first.tokens) / (last.at - first.at)}
    for name in _SHARES:
        part[name] = (getattr(last, name) - getattr(first, name)) / rounds if rounds else None
    for name in _MEANS:
        values = [getattr(sample, name) for sample in samples]
        part[name] = None if None in values else sum(values) / len(values)
    return part


def markdown(summary: Summary) -> str:
    """Two tables: of the whole, and of its parts; then what went wrong."""
    at = ", ".join(f"{at:.0f}" for at in summary.harmed_at)
    there = "there at the end" if summary.draft_back else "not there at the end"
    rows = {
        "under load": f"{summary.seconds:.0f} s, {summary.tokens} tokens",
        "requests finished / aborted / failed": (
            f"{summary.finished} / {summary.aborted} / {len(summary.failures)}"
        ),
        "greedy texts compared / different": f"{summary.compared} / {len(summary.differences)}",
        "longest gap between tokens while others got some": f"{summary.longest_gap:.2f} s",
        "longest wait for a first token": f"{summary.longest_start:.2f} s",
        f"draft {summary.harm}": f"{len(summary.harmed_at)} times (s: {at or 'never'}), {there}",
        "left after the end": str(len(summary.leftovers)),
        "verdict": "; ".join(summary.problems) or "good",
    }
    text = [table_head(["", ""]), *(table_row(row) for row in rows.items())]
    text += ["", table_head(["part", *summary.parts[0]])]
    for number, part in enumerate(summary.parts, 1):
        cells = [_cell(value, ".0%" if name in _SHARES else ".1f") for name, value in part.items()]
        text.append(table_row([str(number), *cells]))
    first, last = summary.parts[0], summary.parts[-1]
    drift = [_drift(first[name], last[name]) if name in _MEANS else "" for name in first]
    text.append(table_row(["last - first", *drift]))
    for name in ("failures", "differences", "leftovers"):
        found = getattr(summary, name)
        text += ["", f"{name}:", *(f"* {line}" for line in found[:_EXAMPLES])] if found else []
    return "\n".join(text)


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _drift(first: float | None, last: float | None) -> str:
    return "–" if first is None or last is None else f"{last - first:+.1f}"
