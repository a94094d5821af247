"""``on_miss: auto``: which drafts the target waits for, by what each plan was measured to yield.

Some plans also say how many drafts a row may have, down to none: on a CPU a row may cost as much as
a step, and on a GPU a full batch is as fast as its arithmetic.

A plan is followed for a *stretch* of steps, and its goodput measured: tokens verified a second.
Mostly the best plan is followed. At turns that get rarer the others have a stretch, those most like
it first. When the best plan's goodput changes by more than chance, all are measured anew. All of
this is known by size of batch.

Prompts come by chance and take as long as many rounds. The runner says which steps have them, and
every plan's goodput is stated for the share of such steps that is usual with all plans.
"""

from __future__ import annotations

from math import log2
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_DRAFTS = 16  # of a row, whatever k is
UNDRAFTED = "no drafts"  # a plan's name
# What limits a step's drafts: nobody, so that each row verifies k tokens; the plans, row by row
# (Model Runner V1); or vLLM, by what they are worth (adaptive verification). It verifies none where
# that is best, but a step for which none are scheduled is faster still.
Limits = Literal["nobody", "plans", "vLLM"]

_HALF = "half of k"

# Steps at the start of a stretch that still show what was done before it; the same after one
# without drafts, where the draft first reads what it missed; and steps after a prompt that may
# still take longer for it: vLLM schedules ahead.
_SETTLING, _CATCHING_UP, _AFTER_PROMPT = 4, 16, 2
# A stretch is measured for this number of rounds, but for this number of steps at least; and for
# this number of rounds where plans limit drafts: on CPUs, where a round takes 0.1 s and more.
_ROUNDS, _STEPS, _SLOW_ROUNDS = 64, 12, 24
# One with a goodput below this part of the best ends after this part of its rounds, and after this
# number of steps at least.
_HOPELESS, _EARLY, _FEWEST = 0.85, 0.75, 4
# Stretches of the best plan between two turns of the others, at first and at most; doubled each
# time.
_FIRST_TURN, _LAST_TURN = 8, 64
# The same at most while vLLM limits drafts and the best plan has none, as texts that are easier to
# draft for do not show by themselves; but then stretches with drafts may take this share of the
# time more than without, whatever a step of theirs costs, and are this multiple as long.
_LAST_UNDRAFTED_TURN = 32
_TRIAL_SHARE, _TRIAL_LENGTH, _RAREST_TURN = 0.01, 2.0, 256
# In one of this number of turns, plans beyond a hopeless one are tried too.
_ALL_PLANS = 4
# By how much another plan must be better to replace the best one, and one without drafts: what is
# equal is rather done without.
_CLEARLY, _UNDRAFTED_CLEARLY = 1.03, 1.01
# What earlier stretches weigh, beside a new one: of a plan; of the best plan where the latest are
# looked at, and of every plan while the best one has no drafts, as its goodput does not show that
# the texts have changed; of all plans.
_KEPT, _KEPT_LATELY, _KEPT_USUAL = 0.95, 0.7, 0.98
# Texts have changed when the best plan's latest goodput differs from what it was by this factor,
# and by this multiple of what two of its stretches differ by: by this share at first, as measured
# over about this number of them later. Shorter stretches differ by more.
_CHANGED, _BY_CHANCE, _NOISE, _NOISES = 1.12, 1.3, 0.06, 16
_SLOW_CHANGED = 1.4
# The first plan, by log2 of the requests: with more of them, a wait for all is longer. And where
# plans limit drafts: few rows are sure to have room for them.
_FIRST_PLANS = ("both", "branches", "branches", "branches", "nothing")
_FIRST_LIMITED_PLANS = ("both", "branches", UNDRAFTED)
# log2 of the requests from which nothing is waited for, as a draft that works for all of them is
# slower than their verification; and from which vLLM's limit may be none.
_WITHOUT_WAITS, _WITHOUT_DRAFTS = 6, 4
# Batches belong to one size class if they differ by less than this power of two.
_SAME_SIZE = 0.75

# What was measured, float64 [2, 3]: without prompts and with them, steps, seconds and tokens.
_Measured = NDArray[np.float64]


class WaitPlan(NamedTuple):
    """Drafts that are waited for: where the outcome was predicted or nothing is predicted yet, and
    where it was not. drafts: the most that a row may have; 0: the target does without the draft."""

    branch: int
    fallback: int
    drafts: int = MOST_DRAFTS


def wait_plans(k: int, limits: Limits = "nobody") -> dict[str, WaitPlan]:
    """The plans for ``k`` drafts a round, by name; each waits for more than the one before."""
    plans = {}
    if limits != "nobody":
        plans[UNDRAFTED] = WaitPlan(0, 0, 0)
    if limits == "plans":
        plans[_HALF] = WaitPlan(0, 0, (k + 1) // 2)
    plans |= {
        "nothing": WaitPlan(0, 0),
        "half of branches": WaitPlan(k // 2, 0),
        "branches": WaitPlan(k, 0),
        "half of fallbacks": WaitPlan(k, k // 2),
        "both": WaitPlan(k, k),
    }
    first_names = {plan: name for name, plan in reversed(plans.items())}  # with k=1 two are alike
    return {name: plan for plan, name in reversed(first_names.items())}


def _nothing() -> _Measured:
    return np.zeros((2, 3))


class _SizeClass:
    """What is known of batches of about ``2**size`` requests, and the stretch that is measured."""

    def __init__(self, size: int, plans: list[str]):
        self.size = size
        self._limited = limited = _HALF in plans  # by plans, row by row
        self._rounds = (_SLOW_ROUNDS if limited else _ROUNDS) >> size
        self._changed = _SLOW_CHANGED if limited else _CHANGED
        self._enough = max(_STEPS, self._rounds)
        self._plans = plans
        first = _FIRST_LIMITED_PLANS if limited else _FIRST_PLANS
        self._best = self.current = first[min(size, len(first) - 1)]
        self._known: dict[str, _Measured] = {}  # of each plan, since the texts have changed
        self._usual, self._lately = _nothing(), _nothing()  # of all plans; of the best plan
        self._last = 0.0  # goodput of the best plan's last stretch
        self._noise = _NOISE
        self._turns = self._until_turn = 0
        self._due: list[str] = []
        self.begin()

    def begin(self, after: str | None = None) -> None:
        """A stretch of the current plan begins, again if it was interrupted. after: the plan that
        was followed until now; None: it does not matter."""
        self._stretch = _nothing()
        behind = after == UNDRAFTED != self.current and not self._limited
        self._settling = _CATCHING_UP if behind else _SETTLING

    def add(self, seconds: float, tokens: int, has_prompts: bool) -> None:
        """Another step of the stretch has ended."""
        if self._settling:
            self._settling -= 1
            return
        self._stretch[int(has_prompts)] += (1, seconds, tokens)
        without, with_prompts = self._stretch[:, 0]
        steps = max(without, (without + with_prompts) / 2)
        early = steps >= max(self._rounds * _EARLY, _FEWEST)
        another = early and self.current != self._best
        # Where drafts do not pay without a wait, they hardly do with one, and that is dear to try.
        least, turn = (1.0, 0) if self._best == UNDRAFTED else (_HOPELESS, 2)
        hopeless = another and self._goodput(self._stretch) < least * self._best_goodput()
        if hopeless or steps >= self._enough:
            if hopeless and self._turns % _ALL_PLANS != turn:
                self._skip_beyond()
            self._take()
            before = self.current
            self._choose()
            self.begin(before)

    @property
    def _idles(self) -> bool:
        """Whether the draft does nothing under the best plan, where vLLM limits drafts."""
        return self._best == UNDRAFTED and not self._limited

    def _goodput(self, measured: _Measured) -> float:
        """Tokens a second, if as many of the steps had had prompts as usual."""
        steps, seconds, tokens = measured.sum(axis=0).tolist()
        counts = self._usual[:, 0]
        if counts.all():
            missing = steps * counts[1] / counts.sum() - measured[1, 0]
            without, with_prompts = self._usual[:, 1:] / counts[:, None]
            seconds, tokens = (seconds, tokens) + missing * (with_prompts - without)
        return float(tokens / seconds) if seconds > 0 else 0.0

    def _best_goodput(self) -> float:
        """0 as long as nothing is known of it."""
        return self._goodput(self._known[self._best]) if self._best in self._known else 0.0

    def _others(self) -> list[str]:
        """All plans but the best, those most like it first; but before all others the one without
        drafts, as nothing must be slower than that for long."""
        plans, best = self._plans, self._plans.index(self._best)
        others = plans[:best] + plans[best + 1 :]
        return sorted(others, key=lambda n: n != UNDRAFTED and abs(plans.index(n) - best))

    def _skip_beyond(self) -> None:
        """Plans that differ from the best one as the current one does, and by more, are worse."""
        place, best = self._plans.index(self.current), self._plans.index(self._best)
        beyond = self._plans[place:] if place > best else self._plans[:place]
        self._due = [name for name in self._due if name not in beyond]

    def _take(self) -> None:
        """Take in the stretch."""
        self._usual = _KEPT_USUAL * self._usual + self._stretch
        if self.current == self._best:
            goodput = self._goodput(self._stretch)
            if self._last:
                self._noise += (abs(goodput / self._last - 1) - self._noise) / _NOISES
            self._last = goodput
            self._lately = _KEPT_LATELY * self._lately + self._stretch
            goodputs = self._goodput(self._lately), self._best_goodput()
            limit = max(self._changed, 1 + _BY_CHANCE * self._noise)
            changed = min(goodputs) and max(goodputs) > limit * min(goodputs)
            if changed and not self._idles:
                # Of this stretch, too, a part may be of the texts before.
                self._known.clear()
                self._usual, self._lately, self._last = _nothing(), _nothing(), 0.0
                self._turns = self._until_turn = 0
                return
        before = self._known.get(self.current, _nothing())
        kept = _KEPT_LATELY if self._idles else _KEPT
        self._known[self.current] = kept * before + self._stretch

    def _choose(self) -> None:
        """The plan of the next stretch."""
        goodputs = {name: self._goodput(measured) for name, measured in self._known.items()}
        fastest = max(goodputs, key=lambda name: goodputs[name], default=self._best)
        clearly = _UNDRAFTED_CLEARLY if fastest == UNDRAFTED else _CLEARLY
        if goodputs.get(fastest, 0.0) > clearly * self._best_goodput():
            idled = self._idles
            self._best, self._lately, self._last = fastest, self._known[fastest], 0.0
            if idled or self._idles:
                self._turns = self._until_turn = 0  # it may have been chance
        if self._known and not self._until_turn and not self._due:
            self._due = self._others()
            self._turns += 1
            self._until_turn = self._stretches_until_next_turn()
        if self._due:
            self.current = self._due.pop(0)
        else:
            self._until_turn = max(self._until_turn - 1, 0)
            self.current = self._best

    def _stretches_until_next_turn(self) -> int:
        """Of the best plan."""
        wished = _FIRST_TURN << self._turns >> 1
        if not self._idles:
            return min(wished, _LAST_TURN)
        others = [self._goodput(m) for name, m in self._known.items() if name != UNDRAFTED]
        slower = self._best_goodput() / max(others, default=0.0) - 1 if any(others) else 0.0
        affordable = int(_TRIAL_LENGTH * max(slower, 0.0) / _TRIAL_SHARE)
        return max(min(wished, _LAST_UNDRAFTED_TURN), min(affordable, _RAREST_TURN))


class WaitTuner:
    """``plan`` once a step."""

    def __init__(self, k: int, limits: Limits = "nobody"):
        self._plans = wait_plans(k, limits)
        self._limits = limits
        self._classes: dict[int, _SizeClass] = {}  # by log2 of the requests
        self._class: _SizeClass | None = None  # of the last batch
        self._now = 0.0
        self._tokens = 0
        self._since_prompt = 0

    def plan(self, batch: int, has_prompts: bool, tokens: int, now: float) -> WaitPlan:
        """For a step of ``batch`` requests, in which prompts are read if ``has_prompts``. tokens:
        verified so far, of all requests; now: monotonic seconds."""
        seconds, gained = now - self._now, tokens - self._tokens
        self._now, self._tokens = now, tokens
        self._since_prompt = 0 if has_prompts else self._since_prompt + 1
        size = log2(max(batch, 1))
        if self._class is not None and abs(size - self._class.size) <= _SAME_SIZE:
            self._class.add(seconds, gained, self._since_prompt <= _AFTER_PROMPT)
        else:
            nearest = round(size)
            if nearest not in self._classes:
                self._classes[nearest] = _SizeClass(nearest, self._names(nearest))
            self._class = self._classes[nearest]
            self._class.begin()
        return self._plans[self._class.current]

    def _names(self, size: int) -> list[str]:
        """The plans for batches of ``2**size`` requests."""
        undrafted = self._limits == "plans" or size >= _WITHOUT_DRAFTS
        return [
            name
            for name, plan in self._plans.items()
            if (plan.drafts or undrafted) and (not plan.branch or size < _WITHOUT_WAITS)
        ]
