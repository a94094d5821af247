"""What comes of the ways to wait, measured.

What is reasoned (``yields.py``) is done, but now and then, for a short stretch of steps, everything
is waited for, or nothing. Where one of these has yielded clearly more tokens a second with batches
of about this size, that is done instead, until another yields clearly more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

# A stretch: first so many steps until the counters show what is done, then so many rounds that are
# measured, and steps at least.
_SETTLING, _ROUNDS, _STEPS = 6, 64, 8
# Stretches until the other ways have their turn, at first and at last: twice as many each time.
_FIRST_TURN, _LAST_TURN = 4, 64
# Of what was measured before, this much counts at the next stretch.
_KEPT = 0.85
# So much better must another way be; one that is so much worse has only every so many-th turn,
# which ends after this part of a stretch, in steps at least.
_CLEARLY, _HOPELESS, _RARELY = 1.05, 0.8, 8
_EARLY, _FEWEST = 4, 4

Way = Literal["reasoned", "wait", "skip"]
_WAYS: tuple[Way, ...] = ("reasoned", "wait", "skip")


class Ways:
    """Chooses one, step by step. count: how many tokens there have been altogether."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._by_size: defaultdict[int, _Known] = defaultdict(_Known)
        self._size = -1
        self._durations: list[float] = []  # of the stretch's steps
        self._tokens = 0  # where its measured part began

    def next(self, size: int, took: float) -> Way:
        """For a step of about 2**size requests, when the last one counts for so many seconds."""
        known = self._by_size[size]
        self._durations.append(took)
        if size != self._size:  # what was begun with batches of this size begins again
            self._size = size
            self._durations.clear()
        elif self._is_over(known):
            known.go_on()
            self._durations.clear()
        return known.way

    def _is_over(self, known: _Known) -> bool:
        """Whether the stretch is, since it is long enough or hopeless; then it has been counted."""
        steps = len(self._durations) - _SETTLING
        if steps == 0:
            self._tokens = self._count()
        enough = max(_STEPS, _ROUNDS >> self._size)
        if steps < enough and steps != max(enough // _EARLY, _FEWEST):
            return False
        seconds = sum(self._durations[_SETTLING:])
        tokens = self._count() - self._tokens
        if steps < enough and not known.is_hopeless(tokens / seconds):
            return False
        known.measured(tokens, seconds)
        return True


@dataclass
class _Known:
    """What is known of the ways, for batches of about one size."""

    way: Way = "reasoned"  # of this stretch
    best: Way = "reasoned"  # when no other has its turn
    tokens: dict[Way, float] = field(default_factory=dict)
    seconds: dict[Way, float] = field(default_factory=dict)
    turns: int = 0
    until_turn: int = _FIRST_TURN
    due: list[Way] = field(default_factory=list)

    def measured(self, tokens: int, seconds: float) -> None:
        """What came of the stretch."""
        self.tokens[self.way] = self.tokens.get(self.way, 0.0) * _KEPT + tokens
        self.seconds[self.way] = self.seconds.get(self.way, 0.0) * _KEPT + seconds

    def go_on(self) -> None:
        """Choose what to do in the next stretch."""
        rates = self._rates()
        fastest = max(rates, key=lambda way: rates[way])
        # From one way to another costs something, too: what is about as good stays.
        if self.best not in rates or rates[fastest] > _CLEARLY * rates[self.best]:
            self.best = fastest
        if not self.until_turn:
            self.due = [way for way in _WAYS if way != self.best]
            if self.turns % _RARELY:
                self.due = [w for w in self.due if not (w in rates and self.is_hopeless(rates[w]))]
            self.turns += 1
            self.until_turn = min(_FIRST_TURN << self.turns, _LAST_TURN)
        if self.due:
            self.way = self.due.pop()
        else:
            self.until_turn -= 1
            self.way = self.best

    def is_hopeless(self, rate: float) -> bool:
        """Beside the best, a rate of so many tokens a second."""
        return rate < _HOPELESS * self._rates().get(self.best, 0.0)

    def _rates(self) -> dict[Way, float]:
        """Tokens a second."""
        return {way: self.tokens[way] / seconds for way, seconds in self.seconds.items()}
