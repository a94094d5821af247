"""What comes of the ways to wait, measured.

What is reasoned (``yields.py``) is done, but now and then, for a short stretch of steps, everything
is waited for, or nothing. Where one of these has yielded clearly more tokens a second with batches
of about this size, that is done instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_high
from typing import Literal

# A stretch: first so many steps until the counters show what is done, then so many rounds that are
# measured, and steps at least.
_SETTLING, _ROUNDS, _STEPS = 4, 64, 8
# Stretches until the other ways have their turn, at first and at last: twice as many each time.
_FIRST_TURN, _LAST_TURN = 8, 64
# Of what was measured before, this much counts at the next stretch.
_KEPT = 0.75
# So much better must another way be; one that is so much worse has only every so many-th turn,
# and ends early.
_CLEARLY, _HOPELESS, _RARELY = 1.1, 0.8, 8

Way = Literal["reasoned", "wait", "skip"]
_WAYS: tuple[Way, ...] = ("reasoned", "wait", "skip")


class Ways:
    """Chooses one, step by step. count: how many tokens there have been altogether."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._by_size: dict[int, _Known] = {}
        self._size = 0  # of the stretch's batches, as a power of 2
        self._way: Way = "reasoned"
        self._durations: list[float] = []  # of the stretch's steps
        self._tokens = 0  # where its measured part began

    def next(self, batch: int, took: float) -> Way:
        """For a step of so many requests, when the last one took so many seconds."""
        size = batch.bit_length()
        self._durations.append(took)
        if size != self._size or self._is_over(self._by_size[size]):
            self._size = size
            self._durations.clear()
            self._way = self._by_size.setdefault(size, _Known()).next()
        return self._way

    def _is_over(self, known: _Known) -> bool:
        """Whether the stretch is, since it is long enough or hopeless; then it has been counted."""
        steps = len(self._durations) - _SETTLING
        if steps == 0:
            self._tokens = self._count()
        whole = steps >= max(_STEPS, _ROUNDS >> self._size - 1)
        if not whole and steps != _STEPS:
            return False
        # Prompts and pauses are nobody's fault.
        durations = self._durations[_SETTLING:]
        longest = 2 * median_high(durations)
        seconds = sum(min(each, longest) for each in durations)
        tokens = self._count() - self._tokens
        if not whole and not known.is_hopeless(tokens / seconds):
            return False
        known.measured(self._way, tokens, seconds)
        return True


@dataclass
class _Known:
    """What is known of the ways, for batches of about one size."""

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
        best = self._best()
        if not self.until_turn:
            rates = self._rates()
            self.due = [way for way in _WAYS if way != best]
            if self.turns % _RARELY:
                self.due = [w for w in self.due if not (w in rates and self.is_hopeless(rates[w]))]
            self.turns += 1
            self.until_turn = min(_FIRST_TURN << self.turns, _LAST_TURN)
        if self.due:
            return self.due.pop()
        self.until_turn -= 1
        return best

    def is_hopeless(self, rate: float) -> bool:
        """Beside the best, a rate of so many tokens a second."""
        return rate < _HOPELESS * self._rates().get(self._best(), 0.0)

    def _best(self) -> Way:
        """What is reasoned, unless another is clearly better."""
        rates = self._rates()
        if "reasoned" not in rates:
            return "reasoned"
        least = _CLEARLY * rates["reasoned"]
        better = [(rate, way) for way, rate in rates.items() if rate > least]
        return max(better)[1] if better else "reasoned"

    def _rates(self) -> dict[Way, float]:
        """Tokens a second."""
        return {way: self.tokens[way] / seconds for way, seconds in self.seconds.items()}
