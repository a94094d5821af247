"""How many drafts are worth waiting for, by what each of them yields and costs.

Let a step of s rows yield s * y tokens in the time t. If m of the rows have drafts of a source,
verify d of them and yield G(d) tokens more than without, and waiting for the d-th takes w(d), then
the best d has the largest m * G(d) - w(d) * s * y / t: what is gained, less what would have been
gained in that time. (As y and t follow from what was decided, this leads step by step to the most
tokens a second.) G is what was accepted of late, less what rows without drafts accept of their
guesses. Branches are late for all rows that have one, since they grow together; an answer holds up
all for one row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_ssd.table import ANSWER, BRANCH, NOWHERE, SOURCES, SpeculationTable

# About so many of the last rounds count.
_MEMORY = 64
# Steps before an answer: one that runs, half of it on average, and on a GPU one behind it.
_AT_WORK = 1.5
# To begin with, each draft is accepted as often as so many of them would say, and so are guesses.
_PRIOR, _ACCEPTED, _GUESSED = 4.0, 0.7, 0.1


class Depths(NamedTuple):
    """Drafts that are waited for, where the outcome was predicted and where it was not."""

    branch: int
    answer: int


class Yields:
    """Yields are measured by the target, steps by the draft; all is in the table."""

    def __init__(self, table: SpeculationTable):
        self._target, self._draft = table.target[0], table.draft[0]
        offered = np.full((len(SOURCES), table.shape.k), _PRIOR)
        accepted = offered * _ACCEPTED
        accepted[NOWHERE] = _PRIOR * _GUESSED
        self._drafts = _Recent(np.hstack([offered, accepted]))
        self._rows = _Recent([[0, 0, 0]])  # looked up, not predicted, late
        self._rounds = _Recent([[0, 0]])  # verified, tokens
        self._steps = _Recent([[0, 0], [0, 0]])  # of branches, of answers: how many, microseconds

    def tokens(self) -> int:
        """Of all rounds that have been verified."""
        accepted = self._target["accepted"]
        return int(accepted @ np.arange(1, len(accepted) + 1))

    def renew(self) -> None:
        """Take in what has been counted."""
        target, draft = self._target, self._draft
        self._drafts.take(np.hstack([target["offered"], target["taken"]]))
        self._rows.take([[target[name] for name in ("rounds", "misses", "late")]])
        self._rounds.take([[target["accepted"].sum(), self.tokens()]])
        self._steps.take([[draft[kind], draft[f"{kind}_us"]] for kind in ("branch", "answer")])

    def best(self, batch: int, most: int, step_s: float) -> Depths:
        """The depths for a step of so many requests that takes so long, up to ``most``. As long as
        there is nothing to go by, that many, except that a batch waits for no answers."""
        (verified, tokens), steps = self._rounds.counts[0], self._steps.counts
        if not verified or not steps.all() or not step_s:
            return Depths(most, most if batch == 1 else 0)
        an_us_is_worth = batch * tokens / verified / (step_s * 1e6)
        branch_us, answer_us = steps[:, 1] / steps[:, 0]
        looked_up, missed, late = self._rows.counts[0]
        unlikely = missed / looked_up
        # A draft whose branches are late has yet to end what it is at before it can answer.
        at_work = late / (looked_up - missed) if missed < looked_up else 1.0
        return Depths(
            _peak(
                _rows_like_one(batch, 1 - unlikely) * self._gains(BRANCH)[:most],
                branch_us * an_us_is_worth,
            ),
            _peak(
                _rows_like_one(batch, unlikely) * self._gains(ANSWER)[:most],
                answer_us * an_us_is_worth,
                _AT_WORK * at_work * branch_us * an_us_is_worth,
            ),
        )

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


def _peak(gains: NDArray[np.float64], step: float, before: float = 0.0) -> int:
    """The number of drafts, from 0, for which gains, less what as many steps and what is before
    them cost, are largest."""
    worth = gains - before - step * np.arange(1, len(gains) + 1)
    return int(worth.argmax()) + 1 if worth.max() > 0 else 0
