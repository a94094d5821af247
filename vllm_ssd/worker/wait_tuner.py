"""Chooses a plan for ``on_miss: auto``, by the measured goodput of each plan.

A plan says which draft tokens the target waits for. Some plans also limit how many a row may have,
down to none. On a CPU, a row may cost as much as a step. On a GPU, arithmetic limits full batches.

The tuner follows a plan for a *stretch* of steps, and measures its goodput: tokens verified a
second. Most stretches follow the best plan. In *turns* that become rarer, each other plan gets a
stretch, those most like the best one first. When the best plan's goodput changes by more than
chance, the tuner measures all plans anew. It does all of this separately by size of batch.

Prompts come by chance and take as long as many rounds. The runner says which steps have them. The
goodput of every plan is stated for the share of such steps that is usual with all plans.
"""

from __future__ import annotations

from math import log2
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_DRAFTS = 16  # most draft tokens of a row, whatever k is
UNDRAFTED = "no drafts"  # a plan's name
# The component that limits a step's draft tokens. "nobody": each row verifies k tokens. "plans":
# the plans do, row by row (Model Runner V1). "vLLM": its adaptive verification does, by their
# worth. It verifies none where that is best, but a step without scheduled ones is faster still.
Limits = Literal["nobody", "plans", "vLLM"]

_HALF = "half of k"

# Steps at the start of a stretch that are not measured: _SETTLING, which still show the plan before
# it, or _CATCHING_UP after one without draft tokens, in which the draft reads what it missed.
# _AFTER_PROMPT steps after a prompt may still take longer for it, because vLLM schedules ahead.
_SETTLING, _CATCHING_UP, _AFTER_PROMPT = 4, 16, 2
# A stretch is measured for _ROUNDS rounds, and for _STEPS steps at least. Where plans limit draft
# tokens, it has _SLOW_ROUNDS: that is on CPUs, where a round takes 0.1 s and more.
_ROUNDS, _STEPS, _SLOW_ROUNDS = 64, 12, 24
# A stretch with a goodput below _HOPELESS of the best plan's ends after _EARLY of its rounds, and
# after _FEWEST steps at least.
_HOPELESS, _EARLY, _FEWEST = 0.85, 0.75, 4
# Stretches of the best plan between two turns of the others, at first and at most. Each turn
# doubles them.
_FIRST_TURN, _LAST_TURN = 8, 64
# The most of these stretches while vLLM limits draft tokens and the best plan has none: texts that
# are easier to draft for then do not show by themselves.
_LAST_UNDRAFTED_TURN = 32
# In that case, stretches with draft tokens may add _TRIAL_SHARE to the time, whatever their steps
# cost. They count as _TRIAL_LENGTH times as long. After _RAREST_TURN stretches they come anyway.
_TRIAL_SHARE, _TRIAL_LENGTH, _RAREST_TURN = 0.01, 2.0, 256
# In one of this number of turns, plans beyond a hopeless one are tried too.
_ALL_PLANS = 4
# Factor by which another plan must be better to replace the best one, and factor for the plan
# without draft tokens, which is preferred if both are equal.
_CLEARLY, _UNDRAFTED_CLEARLY = 1.03, 1.01
# Weights of earlier stretches against a new one. _KEPT: of a plan. _KEPT_LATELY: of the best plan's
# latest goodput; and of every plan while the best one has no draft tokens, because its goodput does
# not show that the texts have changed. _KEPT_USUAL: of all plans together.
_KEPT, _KEPT_LATELY, _KEPT_USUAL = 0.95, 0.7, 0.98
# Texts have changed when the best plan's latest goodput differs from the earlier one by _CHANGED,
# and by _BY_CHANCE times the usual difference between two of its stretches. That difference is
# _NOISE at first, later a mean over about _NOISES stretches. CPUs' shorter ones differ by more.
_CHANGED, _BY_CHANCE, _NOISE, _NOISES = 1.12, 1.3, 0.06, 16
_SLOW_CHANGED = 1.4
# The first plan, by log2 of the requests: with more of them, a wait for all is longer. The second
# list applies where plans limit draft tokens: only small batches are sure to have room for them.
_FIRST_PLANS = ("both", "branches", "branches", "branches", "nothing")
_FIRST_LIMITED_PLANS = ("both", "branches", UNDRAFTED)
# log2 of the requests from which the target waits for nothing, because drafting for all of them is
# slower than their verification; and from which vLLM's limit may be no draft tokens.
_WITHOUT_WAITS, _WITHOUT_DRAFTS = 6, 4
# Batches belong to one size class if they differ by less than this power of two.
_SAME_SIZE = 0.75

# A measurement, float64 [2, 3]: steps, seconds and tokens, first without prompts, then with them.
_Measured = NDArray[np.float64]


class WaitPlan(NamedTuple):
    """Numbers of draft tokens. branch: to wait for if the outcome was predicted, or nothing is
    predicted yet. fallback: to wait for if the outcome was not predicted. drafts: the most that a
    row may have; 0: the target decodes without the draft."""

    branch: int
    fallback: int
    drafts: int = MOST_DRAFTS


def wait_plans(k: int, limits: Limits = "nobody") -> dict[str, WaitPlan]:
    """Return the plans for k draft tokens a round, by name. Each waits for more than the last."""
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
    first_names = {plan: name for name, plan in reversed(plans.items())}  # with k=1 some are equal
    return {name: plan for plan, name in reversed(first_names.items())}


def _nothing() -> _Measured:
    return np.zeros((2, 3))


class _SizeClass:
    """The measurements for batches of about ``2**size`` requests, and the current stretch."""

    def __init__(self, size: int, plans: list[str]):
        self.size = size
        self._limited = limited = _HALF in plans  # plans limit draft tokens, row by row
        self._rounds = (_SLOW_ROUNDS if limited else _ROUNDS) >> size
        self._changed = _SLOW_CHANGED if limited else _CHANGED
        self._enough = max(_STEPS, self._rounds)
        self._plans = plans
        first = _FIRST_LIMITED_PLANS if limited else _FIRST_PLANS
        self._best = self.current = first[min(size, len(first) - 1)]
        self._known: dict[str, _Measured] = {}  # by plan, since the texts last changed
        self._usual, self._lately = _nothing(), _nothing()  # of all plans; of the best plan
        self._last = 0.0  # goodput of the best plan's last stretch
        self._noise = _NOISE
        self._turns = self._until_turn = 0
        self._due: list[str] = []
        self.begin()

    def begin(self, after: str | None = None) -> None:
        """Begin a stretch of the current plan, again if it was interrupted. after: the plan of the
        steps until now; None: it does not matter."""
        self._stretch = _nothing()
        behind = after == UNDRAFTED != self.current and not self._limited
        self._settling = _CATCHING_UP if behind else _SETTLING

    def add(self, seconds: float, tokens: int, has_prompts: bool) -> None:
        """Take in a step of the stretch. If the stretch ends, choose the plan of the next one."""
        if self._settling:
            self._settling -= 1
            return
        self._stretch[int(has_prompts)] += (1, seconds, tokens)
        without, with_prompts = self._stretch[:, 0]
        steps = max(without, (without + with_prompts) / 2)
        early = steps >= max(self._rounds * _EARLY, _FEWEST)
        another = early and self.current != self._best
        # If draft tokens do not pay without a wait, they hardly do with one, and trials cost.
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
        """Whether vLLM limits draft tokens, and the draft is idle under the best plan."""
        return self._best == UNDRAFTED and not self._limited

    def _goodput(self, measured: _Measured) -> float:
        """Return tokens a second, corrected to the usual share of steps with prompts."""
        steps, seconds, tokens = measured.sum(axis=0).tolist()
        counts = self._usual[:, 0]
        if counts.all():
            missing = steps * counts[1] / counts.sum() - measured[1, 0]
            without, with_prompts = self._usual[:, 1:] / counts[:, None]
            seconds, tokens = (seconds, tokens) + missing * (with_prompts - without)
        return float(tokens / seconds) if seconds > 0 else 0.0

    def _best_goodput(self) -> float:
        """Return the best plan's goodput; 0 while it has no measurement."""
        return self._goodput(self._known[self._best]) if self._best in self._known else 0.0

    def _others(self) -> list[str]:
        """Return all plans but the best, those most like it first. The plan without draft tokens
        comes before all others, because ssd must not be slower than that for long."""
        plans, best = self._plans, self._plans.index(self._best)
        others = plans[:best] + plans[best + 1 :]
        return sorted(others, key=lambda n: n != UNDRAFTED and abs(plans.index(n) - best))

    def _skip_beyond(self) -> None:
        """Skip the plans beyond the current one, seen from the best one: they are worse."""
        place, best = self._plans.index(self.current), self._plans.index(self._best)
        beyond = self._plans[place:] if place > best else self._plans[:place]
        self._due = [name for name in self._due if name not in beyond]

    def _take(self) -> None:
        """Add the stretch to the measurements, or drop all of them if the texts have changed."""
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
                # A part of this stretch may be of the earlier texts too, so it is dropped.
                self._known.clear()
                self._usual, self._lately, self._last = _nothing(), _nothing(), 0.0
                self._turns = self._until_turn = 0
                return
        before = self._known.get(self.current, _nothing())
        kept = _KEPT_LATELY if self._idles else _KEPT
        self._known[self.current] = kept * before + self._stretch

    def _choose(self) -> None:
        """Choose the plan of the next stretch."""
        goodputs = {name: self._goodput(measured) for name, measured in self._known.items()}
        fastest = max(goodputs, key=lambda name: goodputs[name], default=self._best)
        clearly = _UNDRAFTED_CLEARLY if fastest == UNDRAFTED else _CLEARLY
        if goodputs.get(fastest, 0.0) > clearly * self._best_goodput():
            idled = self._idles
            self._best, self._lately, self._last = fastest, self._known[fastest], 0.0
            if idled or self._idles:
                self._turns = self._until_turn = 0  # try others soon: it may be chance
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
        """Return the number of stretches of the best plan until the others' next turn."""
        wished = _FIRST_TURN << self._turns >> 1
        if not self._idles:
            return min(wished, _LAST_TURN)
        others = [self._goodput(m) for name, m in self._known.items() if name != UNDRAFTED]
        slower = self._best_goodput() / max(others, default=0.0) - 1 if any(others) else 0.0
        affordable = int(_TRIAL_LENGTH * max(slower, 0.0) / _TRIAL_SHARE)
        return max(min(wished, _LAST_UNDRAFTED_TURN), min(affordable, _RAREST_TURN))


class WaitTuner:
    """Measures the plans by size of batch. Call ``plan`` once a step."""

    def __init__(self, k: int, limits: Limits = "nobody"):
        self._plans = wait_plans(k, limits)
        self._limits = limits
        self._classes: dict[int, _SizeClass] = {}  # by log2 of the requests
        self._class: _SizeClass | None = None  # of the last batch
        self._now = 0.0
        self._tokens = 0
        self._since_prompt = 0

    def plan(self, batch: int, has_prompts: bool, tokens: int, now: float) -> WaitPlan:
        """Return the plan for a step of ``batch`` requests. has_prompts: whether it reads prompts.
        tokens: verified so far, of all requests. now: monotonic seconds."""
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
        """Return the names of the plans for batches of ``2**size`` requests."""
        undrafted = self._limits == "plans" or size >= _WITHOUT_DRAFTS
        return [
            name
            for name, plan in self._plans.items()
            if (plan.drafts or undrafted) and (not plan.branch or size < _WITHOUT_WAITS)
        ]
