"""What the target waits for.

``auto`` waits for as many drafts as ``yields.py`` finds worth it. That is reasoned, from what can
be measured of the parts; what comes of it, in tokens a second, is measured as well, and so is,
now and then for a short while, what comes of waiting for everything and for nothing. Where one of
these is clearly better, it is what is done.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median_high
from typing import Literal

import numpy as np

from vllm_ssd.table import SpeculationTable
from vllm_ssd.target.yields import Depths, Yields

# A stretch of steps in which one thing is done: first so many until the counters show it, then so
# many that are measured.
_SETTLING, _MEASURED = 4, 16
# Stretches until the other ways have their turn, at first and at last: twice as many each time.
_FIRST_TURN, _LAST_TURN = 2, 64
# Of what was measured before, this much counts at the next stretch.
_KEPT = 0.75
# So much better must another way be; one that is so much worse has only every so many-th turn.
_CLEARLY, _HOPELESS, _RARELY = 1.05, 0.8, 8

Way = Literal["reasoned", "wait", "skip"]
_WAYS: tuple[Way, ...] = ("reasoned", "wait", "skip")


@dataclass(frozen=True)
class WaitPolicy:
    """on_miss: ``wait`` for the draft up to ``max_wait_s`` a round until ``min_depth`` drafts are
    there, or ``skip``: take what is there; ``auto``: wait for as many as pay, up to min_depth."""

    on_miss: Literal["auto", "wait", "skip"]
    min_depth: int
    max_wait_s: float


@dataclass
class _Ways:
    """What is known of the ways to wait, for batches of about one size."""

    tokens: dict[Way, float] = field(default_factory=dict)
    seconds: dict[Way, float] = field(default_factory=dict)
    turns: int = 0
    until_turn: int = _FIRST_TURN
    due: list[Way] = field(default_factory=list)

    def measured(self, way: Way, tokens: int, seconds: float) -> None:
        self.tokens[way] = self.tokens.get(way, 0.0) * _KEPT + tokens
        self.seconds[way] = self.seconds.get(way, 0.0) * _KEPT + seconds

    def next(self) -> Way:
        """What to do in the next stretch."""
        rates = {w: self.tokens[w] / spent for w, spent in self.seconds.items() if spent}
        best: Way = "reasoned"
        for way in rates:
            if rates[way] > _CLEARLY * rates.get("reasoned", np.inf):
                best = max(best, way, key=lambda way: rates[way])
        if not self.until_turn:
            least = _HOPELESS * rates.get(best, 0.0) if self.turns % _RARELY else 0.0
            self.due = [w for w in _WAYS if w != best and rates.get(w, np.inf) > least]
            self.turns += 1
            self.until_turn = min(_FIRST_TURN << self.turns, _LAST_TURN)
        if self.due:
            return self.due.pop()
        self.until_turn -= 1
        return best


class Patience:
    """Decides for a ``WaitPolicy``, step by step."""

    def __init__(self, policy: WaitPolicy, table: SpeculationTable):
        self._policy = policy
        self._yields = Yields(table)
        self._by_size: dict[int, _Ways] = {}
        self._way: Way = "reasoned"
        self._size = 0  # of the stretch's batches, as a power of 2
        self._durations: deque[float] = deque(maxlen=_MEASURED)
        self._steps = 0  # of the stretch
        self._last = self._step_s = 0.0
        self._tokens = 0
        self._reasoned: dict[int, Depths] = {}

    def decide(self, batch: int, now: float | None = None) -> Depths:
        """For a step of so many requests whose outcomes are not counted yet; now: in seconds."""
        most, on_miss = self._policy.min_depth, self._policy.on_miss
        if on_miss == "auto":
            self._follow(batch.bit_length(), time.monotonic() if now is None else now)
            if self._way == "reasoned":
                return self._reason(batch)
            on_miss = self._way
        most *= on_miss == "wait"
        return Depths(most, most)

    def _follow(self, size: int, now: float) -> None:
        """Another step: measure the stretch, and begin another one where it ends."""
        if self._last:
            self._durations.append(now - self._last)
        self._last = now
        self._steps += 1
        if self._steps == _SETTLING:
            self._tokens = self._yields.tokens()
            self._durations.clear()
        whole = self._steps == _SETTLING + _MEASURED
        if not whole and size == self._size:
            return
        if whole and size == self._size:
            # Prompts and pauses are nobody's fault.
            longest = 2 * median_high(self._durations)
            seconds = sum(min(each, longest) for each in self._durations)
            if self._way == "reasoned":
                self._step_s = seconds / len(self._durations)
            tokens = self._yields.tokens() - self._tokens
            self._by_size[size].measured(self._way, tokens, seconds)
        self._yields.renew()
        self._reasoned.clear()
        self._size, self._steps = size, 0
        self._way = self._by_size.setdefault(size, _Ways()).next()

    def _reason(self, batch: int) -> Depths:
        if batch not in self._reasoned:
            self._reasoned[batch] = self._yields.best(batch, self._policy.min_depth, self._step_s)
        return self._reasoned[batch]
