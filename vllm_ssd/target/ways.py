"""What comes of the ways to wait, measured.

What is reasoned (``yields.py``) is done, but now and then, for a short stretch of steps, everything
is waited for, or nothing. Where one of these has yielded clearly more tokens a second with batches
of about this size, that is done instead, until another yields clearly more. When texts change, all
of it is found out anew.

Prompts come by chance, and each takes as long as many rounds. So it is measured how long a step is
without one, and how much longer with one, which is less where it hides a wait; and every way is
charged for as many prompts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from vllm_ssd.target.steps import Took

# A stretch: first so many steps until the counters show what is done, then so many rounds that are
# measured, and steps at least.
_SETTLING, _ROUNDS, _STEPS = 6, 64, 12
# Stretches until the other ways have their turn, at first and at last: twice as many each time.
_FIRST_TURN, _LAST_TURN = 4, 64
# So much better must another way be; one that is so much worse has only every so many-th turn,
# which ends after this part of a stretch, in steps at least.
_CLEARLY, _HOPELESS, _RARELY = 1.03, 0.8, 8
_EARLY, _FEWEST = 4, 4
# Beside a stretch, those before count for so much; and where the last ones are looked at.
_KEPT, _LATELY_KEPT = 0.98, 0.7
# Texts have changed when those differ by this factor from the rest, with the best way, and by so
# many times what each stretch differs from the one before.
_CHANGED, _BY_CHANCE = 1.12, 1.3
# That is so much at first, and then what it was in about so many of the last ones.
_NOISE, _NOISES = 0.06, 16
# To begin with, prompts take as long with a way as so many would say that took what all do.
_PRIOR = 2.0

Way = Literal["reasoned", "wait", "skip"]
_WAYS: tuple[Way, ...] = ("reasoned", "wait", "skip")


@dataclass
class _Yield:
    """What has come of some stretches: tokens, and how long they took, in seconds of each request;
    how many steps had prompts, and how much longer these took."""

    tokens: float = 0.0
    seconds: float = 0.0
    prompts: float = 0.0
    prompts_s: float = 0.0

    def add(self, other: _Yield, kept: float) -> None:
        """What came after it, beside which it counts for so much."""
        self.tokens = self.tokens * kept + other.tokens
        self.seconds = self.seconds * kept + other.seconds
        self.prompts = self.prompts * kept + other.prompts
        self.prompts_s = self.prompts_s * kept + other.prompts_s

    def rate(self, usual: _Yield | None = None) -> float:
        """Tokens a second; with prompts, as many as are usual for so many tokens."""
        seconds = self.seconds
        if usual is not None and usual.tokens and usual.prompts:
            prompts_s = self.prompts_s + _PRIOR * usual.prompts_s / usual.prompts
            each_s = prompts_s / (self.prompts + _PRIOR)
            seconds += self.tokens * usual.prompts / usual.tokens * each_s
        return self.tokens / seconds


class _Lately:
    """What the best way has yielded in its last stretches."""

    def __init__(self) -> None:
        self._yield = _Yield()
        self._last = 0.0  # tokens a second in the last one
        self._noise = _NOISE  # the part by which one differs from the one before

    def begin(self, known: _Yield) -> None:
        """With what is known of another way, or of other texts."""
        self._yield = replace(known)

    def add(self, stretch: _Yield) -> None:
        """Another one."""
        rate = stretch.rate()
        differs = abs(rate / self._last - 1) if self._last else self._noise
        self._noise += (differs - self._noise) / _NOISES
        self._last = rate
        self._yield.add(stretch, _LATELY_KEPT)

    def differs_from(self, before: _Yield) -> bool:
        """By more than chance."""
        rates = self._yield.rate(), before.rate()
        return max(rates) > max(_CHANGED, 1 + _BY_CHANCE * self._noise) * min(rates)


class Ways:
    """Chooses one, step by step, for batches of about 2**size requests. count: how many tokens
    there have been altogether. way: what is done in this stretch."""

    way: Way = "reasoned"

    def __init__(self, size: int, count: Callable[[], int]) -> None:
        self._enough = max(_STEPS, _ROUNDS >> size)
        self._count = count
        self._steps = 0  # of the stretch
        self._before = 0  # tokens, when its measured part began
        self._stretch = _Yield()  # that, but for its tokens
        self._best: Way = "reasoned"  # when no other has its turn
        self._yields: dict[Way, _Yield] = {}  # since texts have changed
        self._lately = _Lately()
        self._usual = _Yield()  # of whatever was done
        self._turns = 0
        self._until_turn = _FIRST_TURN
        self._due: list[Way] = []

    def next(self, batch: int, took: Took) -> Way:
        """For another step; the last one took so long, with so many requests."""
        self._steps += 1
        stretch = self._stretch
        if self._steps > _SETTLING:
            stretch.seconds += batch * took.usual
            stretch.prompts += took.prompt > 0
            stretch.prompts_s += batch * took.prompt
            if self._is_over():
                self._take(stretch)
                self._go_on()
                self._steps = 0
        elif self._steps == _SETTLING:
            self._before, self._stretch = self._count(), _Yield()
        return self.way

    def interrupted(self) -> None:
        """Batches of other sizes came between: the stretch begins again."""
        self._steps = 0

    def _is_over(self) -> bool:
        """Whether the stretch is long enough or hopeless."""
        steps = self._steps - _SETTLING
        if steps < self._enough and steps != max(self._enough // _EARLY, _FEWEST):
            return False
        self._stretch.tokens = self._count() - self._before
        return steps >= self._enough or self._is_hopeless()

    def _is_hopeless(self) -> bool:
        """Whether the stretch is of another way than the best, and so much worse."""
        best = self._yields.get(self._best)
        if best is None or self.way == self._best:
            return False
        return self._stretch.rate(self._usual) < _HOPELESS * best.rate(self._usual)

    def _take(self, stretch: _Yield) -> None:
        """This has come of the last one."""
        if self.way == self._best:
            self._lately.add(stretch)
            if self.way in self._yields and self._lately.differs_from(self._yields[self.way]):
                self._lately.begin(stretch)
                self._yields.clear()
                self._turns = self._until_turn = 0
        self._usual.add(stretch, _KEPT)
        self._yields.setdefault(self.way, _Yield()).add(stretch, _KEPT)

    def _go_on(self) -> None:
        """Choose what to do in the next stretch."""
        rates = {way: found.rate(self._usual) for way, found in self._yields.items()}
        fastest = max(rates, key=lambda way: rates[way])
        # From one way to another costs something, too: what is about as good stays.
        if self._best not in rates or rates[fastest] > _CLEARLY * rates[self._best]:
            self._best = fastest
            self._lately.begin(self._yields[fastest])
        if not self._until_turn:
            least = _HOPELESS * rates[self._best] if self._turns % _RARELY else 0.0
            others = (way for way in _WAYS if way != self._best)
            self._due = [way for way in others if rates.get(way, least) >= least]
            self._turns += 1
            self._until_turn = min(_FIRST_TURN << self._turns, _LAST_TURN)
        if self._due:
            self.way = self._due.pop()
        else:
            self._until_turn -= 1
            self.way = self._best
