"""What comes of the ways to wait, measured.

What is reasoned (``yields.py``) is done, but now and then, for a short stretch of steps, everything
is waited for, or nothing. Where one of these has yielded clearly more tokens a second with batches
of about this size, that is done instead, until another yields clearly more.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Chooses one, step by step, for batches of about 2**size requests. count: how many tokens
    there have been altogether. way: what is done in this stretch."""

    way: Way = "reasoned"

    def __init__(self, size: int, count: Callable[[], int]) -> None:
        self._enough = max(_STEPS, _ROUNDS >> size)
        self._count = count
        self._durations: list[float] = []  # of the stretch's steps
        self._before = 0  # tokens, when its measured part began
        self._best: Way = "reasoned"  # when no other has its turn
        self._tokens: dict[Way, float] = {}
        self._seconds: dict[Way, float] = {}
        self._turns = 0
        self._until_turn = _FIRST_TURN
        self._due: list[Way] = []

    def next(self, took: float) -> Way:
        """For another step, when the last one counts for so many seconds."""
        self._durations.append(took)
        if self._is_over():
            self._go_on()
            self._durations.clear()
        return self.way

    def interrupted(self) -> None:
        """Batches of other sizes came between: the stretch begins again."""
        self._durations.clear()

    def _is_over(self) -> bool:
        """Whether the stretch is, since it is long enough or hopeless; then it has been counted."""
        steps = len(self._durations) - _SETTLING
        if steps == 0:
            self._before = self._count()
        if steps < self._enough and steps != max(self._enough // _EARLY, _FEWEST):
            return False
        seconds = sum(self._durations[_SETTLING:])
        tokens = self._count() - self._before
        if steps < self._enough and not self._is_hopeless(tokens / seconds):
            return False
        self._tokens[self.way] = self._tokens.get(self.way, 0.0) * _KEPT + tokens
        self._seconds[self.way] = self._seconds.get(self.way, 0.0) * _KEPT + seconds
        return True

    def _go_on(self) -> None:
        """Choose what to do in the next stretch."""
        rates = self._rates()
        fastest = max(rates, key=lambda way: rates[way])
        # From one way to another costs something, too: what is about as good stays.
        if self._best not in rates or rates[fastest] > _CLEARLY * rates[self._best]:
            self._best = fastest
        if not self._until_turn:
            self._due = [way for way in _WAYS if way != self._best]
            if self._turns % _RARELY:
                self._due = [
                    w for w in self._due if not (w in rates and self._is_hopeless(rates[w]))
                ]
            self._turns += 1
            self._until_turn = min(_FIRST_TURN << self._turns, _LAST_TURN)
        if self._due:
            self.way = self._due.pop()
        else:
            self._until_turn -= 1
            self.way = self._best

    def _is_hopeless(self, rate: float) -> bool:
        """Beside the best, a rate of so many tokens a second."""
        return rate < _HOPELESS * self._rates().get(self._best, 0.0)

    def _rates(self) -> dict[Way, float]:
        """Tokens a second."""
        return {way: self._tokens[way] / seconds for way, seconds in self._seconds.items()}
