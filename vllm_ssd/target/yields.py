"""How many drafts are worth waiting for, by what they yield and what they cost.

A step verifies all rows of a batch, in a time V if it waits for nothing. Meanwhile the draft shows
its model what is verified, in a time G, and grows branches, B a token. Where those of k tokens do
not fit into V, the draft is at work when the outcomes come, and ends what it has begun, another
token or two (b), before it turns to them. So waiting for branches of d tokens makes a step last
G + (d + b) B; and waiting for nothing leaves them as long as they are by then. Answers come before
all else: a tokens of them cost a step A * a, if a row misses, less what of a wait is hidden: the
host is not ready for the next step either.

What is best yields the most tokens a second, the time for prompts included: the more of it there
is, the more is a draft worth. A row with so many drafts of a branch or of an answer yields what
such drafts did of late, and one without any what its guesses did.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_ssd.table import ANSWER, BRANCH, NOWHERE, SOURCES, SpeculationTable
from vllm_ssd.target.steps import StepTimes

# About so many of the last rounds count.
_MEMORY = 64
# To begin with, each draft is accepted as often as so many of them would say, and so are guesses.
_PRIOR, _ACCEPTED, _GUESSED = 4.0, 0.7, 0.1
# To change what is waited for costs something, too.
_ABOUT_AS_GOOD = 0.97
# The draft's pieces of work that a step waits for, as its counters name them.
_WORK = ("glue", "branch", "answer")


class Depths(NamedTuple):
    """Drafts that are waited for, where the outcome was predicted and where it was not."""

    branch: int
    answer: int


class Yields:
    """Yields are measured by the target, work by the draft; all is in the table."""

    def __init__(self, table: SpeculationTable):
        self._target, self._draft, self._k = table.target[0], table.draft[0], table.shape.k
        offered = np.full((len(SOURCES), table.shape.k), _PRIOR)
        accepted = offered * _ACCEPTED
        accepted[NOWHERE] = _PRIOR * _GUESSED
        self._drafts = _Recent(np.hstack([offered, accepted]))
        self._rows = _Recent([[0, 0]])  # looked up, not predicted
        self._work = _Recent([[0, 0]] * len(_WORK))  # pieces, microseconds
        self._glues = _Recent([[0, 0]])  # steps of the target, glues

    def tokens(self) -> int:
        """Of all rounds that have been verified."""
        accepted = self._target["accepted"]
        return int(accepted @ np.arange(1, len(accepted) + 1))

    def renew(self, steps: int) -> None:
        """Take in what has been counted in so many steps of the target, since the first."""
        target, draft = self._target, self._draft
        self._drafts.take(np.hstack([target["offered"], target["taken"]]))
        self._rows.take([[target[name] for name in ("rounds", "misses")]])
        self._work.take([[draft[kind], draft[f"{kind}_us"]] for kind in _WORK])
        self._glues.take([[steps, draft["glue"]]])

    def best(
        self, batch: int, most: int, step: StepTimes | None, last: Depths | None = None
    ) -> Depths:
        """The depths for steps of so many requests that take so long, up to ``most``. As long as
        there is nothing to go by, that many, except that a batch waits for no answers. Those of
        the last time stay if they are about as good and branches no less deep."""
        looked_up, missed = self._rows.counts[0]
        if not looked_up or not self._work.counts[:2].all() or step is None:
            return Depths(most, most if batch == 1 else 0)
        unlikely = missed / looked_up
        missing = 1 - (1 - unlikely) ** batch
        glue, branch, answer = self._work_s()
        depths = np.arange(most + 1)  # of branches down, of answers across
        waits = depths > 0
        begun = int(self._draft["in_flight"])
        drafted = np.minimum(depths + begun, self._k)

        def mixed(by_depths: NDArray[np.float64]) -> NDArray[np.float64]:
            """The mean over steps that follow one without a miss, and those that follow answers."""
            return (1 - missing) * by_depths[:, :1] + missing * by_depths

        # Tokens of branches in a step without a wait, and in one that verifies answers: first the
        # draft ends those that it has begun beyond them, and the host has got ready before.
        fitting = (step.alone - glue) / branch
        delay_s = (drafted - depths) * answer + np.minimum(depths * answer, step.hidden)
        after = np.where(waits, fitting - delay_s / branch, fitting)
        # Of what a busy draft has begun is left on average; without waits, what does not fit adds
        # up until it is dropped.
        unfinished = max(begun - 0.5, 0.0)
        late = np.maximum(self._k - after, 0.0)
        left = np.tile(np.minimum(late, unfinished), (most + 1, 1))
        left[0, 0] = unfinished * (late[0] > 0)
        left_s = mixed(left) * branch

        # The draft is waited for where its branches are.
        grown = (waits * (glue + drafted * branch))[:, None]
        verified = step.alone + waits * np.maximum(left_s + depths * answer - step.hidden, 0.0)
        busy = waits[:, None] * (grown + waits * (left_s + drafted * answer))
        if_missed = np.maximum(verified, busy)
        step_s = (1 - missing) * np.maximum(step.alone, grown) + missing * if_missed

        in_time = max(fitting - unfinished, 0.0) if late[0] else self._k
        reached = np.maximum(depths[:, None], np.minimum(after, in_time))
        branched = mixed(np.interp(reached, range(self._k + 1), self._tokens(BRANCH)))
        tokens = (1 - unlikely) * branched + unlikely * self._tokens(ANSWER)[depths]
        rates = tokens / (step_s + step.prompts)
        # Of those that cost nothing the deepest: times vary.
        branches = most - int(rates.max(axis=1)[::-1].argmax())
        if last is None or last.branch < branches or rates[last] < _ABOUT_AS_GOOD * rates.max():
            return Depths(branches, int(rates[branches].argmax()))
        return last

    def _work_s(self) -> tuple[float, float, float]:
        """Seconds of a glue, and of a token of branches and of answers."""
        pieces, spent_us = self._work.counts.T
        steps, glues = self._glues.counts[0]
        # Requests whose outcomes come in parts are drafted for in parts.
        parts = max(glues / steps, 1.0)
        glue, branch = parts * spent_us[:2] / pieces[:2] / 1e6
        # Where no answers were waited for yet: they take no longer than branches.
        return glue, branch, spent_us[2] / pieces[2] / 1e6 if pieces[2] else branch

    def _tokens(self, source: int) -> NDArray[np.float64]:
        """That a row yields, by its number of drafts, 0..k; without any it has a guess."""
        offered, accepted = np.hsplit(self._drafts.counts, 2)
        tokens = 1 + (accepted / offered).cumprod(axis=1).cumsum(axis=1)
        by_number: NDArray[np.float64] = np.append(tokens[NOWHERE, -1], tokens[source])
        return by_number


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
