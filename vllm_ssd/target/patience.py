"""How many drafts the target waits for, of branches that are late and of answers to outcomes that
nobody predicted.

Let a step of s rows yield s * y tokens in the time t. If m of the rows have drafts of a source,
verify d of them and yield G(d) tokens more than without, and waiting for the d-th takes w(d), then
the best d has the largest m * G(d) - w(d) * s * y / t: what is gained, less what would have been
gained in that time. (As y and t follow from what was decided, this leads step by step to the most
tokens a second.) G is what was accepted of late, less what rows without drafts accept of their
guesses. Branches are late for all rows that have one, since they grow together; an answer holds up
all for one row.

All is measured, y and t by the target, w by the draft. What is not being done is not measured:
that is what trials are for.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median_high
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_ssd.table import ANSWER, BRANCH, NOWHERE, SpeculationTable

# Steps of which the middle one counts: engines pause and prompts take long.
_WINDOW = 15
# Once in so many steps decisions are made anew; about so many of the last rounds count in them.
_RENEWED_AFTER = 16
_MEMORY = 64
# Once in so many steps, more is waited for than pays for so many steps, and what is done about
# answers is not done for so many rows.
_TRIAL_EVERY = 512
_TRIAL = 4
# Steps before an answer: one that runs, half of it on average, and on a GPU one behind it.
_AT_WORK = 1.5
# To begin with, each draft is accepted as often as so many of them would say, and so are guesses.
_PRIOR, _ACCEPTED, _GUESSED = 4.0, 0.7, 0.1


@dataclass(frozen=True)
class WaitPolicy:
    """on_miss: ``wait`` for the draft up to ``max_wait_s`` a round until ``min_depth`` drafts are
    there, or ``skip``: take what is there; ``auto``: wait for as many as pay, up to min_depth."""

    on_miss: Literal["auto", "wait", "skip"]
    min_depth: int
    max_wait_s: float


class Depths(NamedTuple):
    """Drafts that are waited for, where the outcome was predicted and where it was not."""

    branch: int
    answer: int


class Patience:
    """Decides for ``auto``."""

    def __init__(self, policy: WaitPolicy, table: SpeculationTable):
        self._policy = policy
        self._target, self._draft = table.target[0], table.draft[0]
        k = table.shape.k
        accepted = np.full((3, k), _PRIOR * _ACCEPTED)
        accepted[NOWHERE] = _PRIOR * _GUESSED
        self._drafts = _Recent(np.hstack([np.full((3, k), _PRIOR), accepted]))
        self._rows = _Recent([[0, 0, 0]])  # looked up, not predicted, late
        self._yields = _Recent([[0, 0]])  # verified, tokens
        self._steps = _Recent([[0, 0], [0, 0]])  # of branches, of answers: how many, microseconds
        self._durations: deque[float] = deque(maxlen=_WINDOW)
        self._last = 0.0
        self._looks = 0
        self._rows_by = self._tried = [0] * 3  # verified rows by source, and when the trial began
        self._decided: dict[int, Depths] = {}

    def depths(self, batch: int) -> Depths:
        """For a step of so many requests."""
        enough = self._policy.min_depth
        if self._policy.on_miss != "auto":
            enough *= self._policy.on_miss == "wait"
            return Depths(enough, enough)
        if batch not in self._decided:
            self._decided[batch] = self._decide(batch)
        branch, answer = self._decided[batch]
        if self._looks % _TRIAL_EVERY < _TRIAL:
            branch = enough
        other = NOWHERE if answer else ANSWER
        if self._rows_by[other] - self._tried[other] < _TRIAL:
            answer = 0 if answer else enough
        return Depths(branch, answer)

    def look(self, now: float | None = None) -> None:
        """Rows are about to be looked up, their outcomes not counted yet; now: in seconds."""
        if self._policy.on_miss != "auto":
            return
        now = time.monotonic() if now is None else now
        if self._last:
            self._durations.append(now - self._last)
        self._last = now
        self._looks += 1
        self._rows_by = self._target["offered"][:, 0].tolist()
        if self._looks % _TRIAL_EVERY == 0:
            self._tried = self._rows_by
        if self._looks % _RENEWED_AFTER == 0:
            self._renew()

    def _renew(self) -> None:
        target, draft = self._target, self._draft
        accepted = target["accepted"]
        tokens = accepted @ np.arange(1, len(accepted) + 1)
        self._drafts.take(np.hstack([target["offered"], target["taken"]]))
        self._rows.take([[target[name] for name in ("rounds", "misses", "late")]])
        self._yields.take([[accepted.sum(), tokens]])
        self._steps.take([[draft[kind], draft[f"{kind}_us"]] for kind in ("branch", "answer")])
        self._decided.clear()

    def _decide(self, batch: int) -> Depths:
        """What pays, as far as is known."""
        (verified, tokens), steps = self._yields.counts[0], self._steps.counts
        if not verified or not steps.all():
            return Depths(self._policy.min_depth, self._policy.min_depth if batch == 1 else 0)
        an_us_is_worth = batch * tokens / verified / (median_high(self._durations) * 1e6)
        branch_us, answer_us = steps[:, 1] / steps[:, 0]
        looked_up, missed, late = self._rows.counts[0]
        unlikely = missed / looked_up
        # A draft whose branches are late has yet to end what it is at before it can answer.
        at_work = late / (looked_up - missed) if missed < looked_up else 1.0
        return Depths(
            self._best(
                _rows_like_one(batch, 1 - unlikely) * self._gains(BRANCH),
                branch_us * an_us_is_worth,
            ),
            self._best(
                _rows_like_one(batch, unlikely) * self._gains(ANSWER),
                answer_us * an_us_is_worth,
                _AT_WORK * at_work * branch_us * an_us_is_worth,
            ),
        )

    def _best(self, gains: NDArray[np.float64], step: float, before: float = 0.0) -> int:
        """The number of drafts, 0..min_depth, for which gains, less what as many steps cost and
        what is before them, are largest."""
        cost = before + step * np.arange(1, self._policy.min_depth + 1)
        worth = gains[: len(cost)] - cost
        return int(worth.argmax()) + 1 if worth.max() > 0 else 0

    def _gains(self, source: int) -> NDArray[np.float64]:
        """Tokens by the number of drafts, 1..k, beyond those without any."""
        offered, accepted = np.hsplit(self._drafts.counts, 2)
        tokens = (accepted / offered).cumprod(axis=1).cumsum(axis=1)
        gained: NDArray[np.float64] = tokens[source] - tokens[NOWHERE, -1]
        return gained


class _Recent:
    """Counters that forget: of the last ``_MEMORY`` of each row, mostly. counts: float [rows, ..],
    of which the first column says how many there were."""

    def __init__(self, counts: ArrayLike):
        self.counts = np.array(counts, np.float64)
        self._seen = np.zeros_like(self.counts)

    def take(self, totals: ArrayLike) -> None:
        """Counted since ever."""
        now = np.array(totals, np.float64)
        fresh, self._seen = now - self._seen, now
        self.counts = self.counts * _MEMORY / (_MEMORY + fresh[:, :1]) + fresh


def _rows_like_one(batch: int, chance: float) -> float:
    """How many rows of a batch are to be expected of a kind, if there is one at least."""
    return batch * chance / (1 - (1 - chance) ** batch) if chance > 0 else 1.0
