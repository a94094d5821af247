"""How long steps take, without a wait and with one.

The counters of a GPU tell of a wait some steps later, and nobody knows how many. So what is said
here of single steps is said only of such that are far from any wait, and the rest of many together.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median_high
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# Steps that are remembered, and how many must be known to say something of them.
_MEMORY, _ENOUGH = 32, 8
# The counters lag behind by less than so many steps.
_LAG = 3
# Waits that take less than this part of the steps say nothing of what they cost.
_NOTICEABLE = 0.05
# A step that takes so many times as long as usual has a prompt in it, unless it waited; one that
# takes longer still came after a pause, and counts as so many.
_PROMPT, _PAUSE = 2.0, 10.0
# About so many of the last steps say how much of the time prompts take.
_SPREAD = 64


class StepTimes(NamedTuple):
    """Seconds. alone: of a step that waits for nothing. hidden: so much of a wait makes its step no
    longer, as the host does meanwhile what it else does while the device is idle. prompts: what a
    step takes longer on average because some have prompts in them."""

    alone: float
    hidden: float = 0.0
    prompts: float = 0.0


class Took(NamedTuple):
    """Seconds of one step. usual: without a prompt; prompt: what it takes longer with one, 0 if it
    has none."""

    usual: float
    prompt: float = 0.0


class Steps:
    """Of one size of batch."""

    def __init__(self) -> None:
        self._raw: deque[float] = deque(maxlen=_MEMORY)
        self._durations: deque[float] = deque(maxlen=_MEMORY)  # without prompts
        self._waits: deque[float] = deque(maxlen=_MEMORY)
        self._alone: deque[float] = deque(maxlen=_MEMORY)
        self._since = 0  # steps since others came between
        self._count = 0
        self._hidden = self._prompts = 0.0

    def add(self, took: float, waited: float) -> Took:
        """Another step has ended; waited: what the counters say has been since the last one.
        Returns what is said of the step before the last few."""
        self._since += 1
        if self._since > _LAG:  # before, waits were of other steps
            self._raw.append(took)
            self._waits.append(waited)
        if self._since <= 3 * _LAG:
            return Took(took)
        took = self._raw[-1 - _LAG]
        waited = max(list(self._waits)[-1 - 2 * _LAG :])
        without_prompt = took
        known = self._alone if len(self._alone) >= _ENOUGH else self._raw
        if took > _PROMPT * median_high(known) + waited:
            usual = median_high(self._raw)
            without_prompt = fmean(self._durations or [usual])
            took = min(took, _PAUSE * usual)
        self._durations.append(without_prompt)
        if not waited:
            self._alone.append(took)
        self._count += 1
        self._prompts += (took - without_prompt - self._prompts) / min(self._count, _SPREAD)
        return Took(without_prompt, took - without_prompt)

    def interrupted(self) -> None:
        """Steps of other sizes came between."""
        self._since = 0

    def times(self) -> StepTimes | None:
        """None as long as nothing is known."""
        if not self._durations:
            return None
        if len(self._alone) < _ENOUGH:
            without = [took - waited for took, waited in zip(self._raw, self._waits)]
            return StepTimes(max(median_high(without), 0.0), 0.0, self._prompts)
        alone = median_high(self._alone)
        if fmean(self._waits) > _NOTICEABLE * alone:
            longer = fmean(self._durations) - alone
            self._hidden = min(_hidden(self._waits, longer), alone / 2)
        return StepTimes(alone, self._hidden, self._prompts)


def _hidden(waits: ArrayLike, longer: float) -> float:
    """How much of each wait is hidden, if they make a step longer by so much on average."""
    longest = np.sort(waits)[::-1]
    # If h is hidden, the i longest make steps longer by their sum less i * h in all, and of all
    # choices of i, that of those longer than h makes the most.
    beyond = longest.cumsum() - max(longer, 0.0) * len(longest)
    return max(float((beyond / np.arange(1, len(longest) + 1)).max()), 0.0)
