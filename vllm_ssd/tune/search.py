"""Which candidates are measured: coordinate descent, as a candidate costs the start of an engine.

All drafts are measured at one k and f. Those that come close to the best go on: each climbs along
k, then along f, until neither brings more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from vllm_ssd.tune.records import Candidate

# Another k or f suits a slower draft, but does not make up for much.
KEPT = 0.9
# Two measurements of one candidate differ by as much.
GAIN = 1.01
START = {"k": 7, "f": 3}  # the defaults

Score = Callable[[Candidate], float]


class Enough(Exception):
    """Raised by a score that is not to be asked any more."""


def search(drafts: Sequence[str], ks: Sequence[int], fs: Sequence[int], score: Score) -> None:
    """Ask for the scores of candidates with these drafts and values, ascending, until the best is
    found or ``Enough`` is raised. score: higher is better; it must know what it was asked."""
    start = Candidate(k=nearest(ks, START["k"]), f=nearest(fs, START["f"]))
    try:
        began = {draft: score(msgspec.structs.replace(start, draft=draft)) for draft in drafts}
        best = max(began.values())
        for draft in sorted(drafts, key=lambda draft: -began[draft]):
            if began[draft] >= KEPT * best:
                _climb_all(msgspec.structs.replace(start, draft=draft), ks, fs, score)
    except Enough:
        pass


def nearest(values: Sequence[int], wanted: int) -> int:
    """The value that is closest to the wanted one."""
    return min(values, key=lambda value: abs(value - wanted))


def _climb_all(at: Candidate, ks: Sequence[int], fs: Sequence[int], score: Score) -> None:
    while True:
        before = at
        at = _climb(at, "k", ks, score)
        at = _climb(at, "f", fs, score)
        if at == before:
            return


def _climb(
    at: Candidate, name: Literal["k", "f"], values: Sequence[int], score: Score
) -> Candidate:
    """The best candidate on the way up, or else down, that brings more with each step."""
    for way in (1, -1):
        moved = False
        while True:
            index = values.index(getattr(at, name)) + way
            if not 0 <= index < len(values):
                break
            other = msgspec.structs.replace(at, **{name: values[index]})
            if score(other) <= GAIN * score(at):
                break
            at, moved = other, True
        if moved:
            break
    return at
