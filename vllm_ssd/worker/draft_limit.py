"""Measures under Model Runner V2 whether rows should have draft tokens: all of them, or none.

On a GPU, arithmetic limits full batches. There, each draft token makes the step longer.

A limit is followed for a *stretch* of steps, which measures its goodput: tokens verified a second.
Most stretches follow the best limit. In turns, each other one gets a stretch. Turns are as rare as
what they cost demands. Batches of different size are measured apart. Steps with prompts take longer
and come by chance. So they are compared with other steps that have prompts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import log2

import numpy as np

from vllm_ssd.log import get_logger

logger = get_logger(__name__)

MOST_DRAFTS = 16  # most draft tokens of a row, whatever k is

# A stretch has _STEPS measured steps, or enough for _ROUNDS rounds. Not measured: _SETTLING steps
# before them, which still show the limit before. After a stretch without draft tokens, these are
# _CATCHING_UP steps, in which the draft reads what it missed. _AFTER_PROMPT steps after a
# prompt may still take longer for it, because vLLM schedules ahead.
_STEPS, _ROUNDS, _SETTLING, _CATCHING_UP, _AFTER_PROMPT = 12, 24, 4, 16, 2
# Share of the time that turns may cost, and the fewest and the most steps between two of them.
_TURNS_COST, _SOONEST_TURN, _RAREST_TURN = 0.02, 64, 2048
_KEPT = 0.6  # weight of a limit's earlier stretches against a new one
_CLEARLY = 1.02  # factor by which another limit must be better to replace the best one
# Batches of this number of requests and more may go without draft tokens.
_LARGE = 12
# Batches belong to one size class if they differ by less than this power of two.
_SAME_SIZE = 0.75
_SAY_S = 10.0  # between two log lines of a size class
_STALE_S = 10.0  # a size class without batches for so long tries all limits at once


def most_that_fit(budget: int, requests: int) -> int:
    """Return how many draft tokens each of these requests may have in steps of ``budget`` tokens.
    With more, vLLM leaves out the last requests of its list, step after step. Then the size of a
    batch would also depend on the limit, and no two limits would be measured at the same size."""
    return max(budget // max(requests, 1) - 1, 0)


class _SizeClass:
    """The measurements for batches of about ``2**size`` requests, and the current stretch."""

    def __init__(self, size: int, limits: Sequence[int], first: int):
        self.size = size
        self.best = self.current = first
        self._limits = limits
        self._steps = max(_STEPS, _ROUNDS >> size)
        # By limit: float64 [2, 3] of steps, seconds and tokens, first without prompts, then with.
        self._known = {limit: np.zeros((2, 3)) for limit in limits}
        self._turn: list[int] | None = None  # the limits that are still to be tried; None: no turn
        self._until_turn = 0  # steps of the best limit
        self._said_off, self._said_at = False, float("-inf")
        self._used = time.monotonic()
        self.begin(after=0)

    def enter(self) -> None:
        """Begin anew after batches of other sizes. A burst of new requests may have taught that
        drafts do not pay, and be over."""
        if time.monotonic() > self._used + _STALE_S:
            self._turn, self._until_turn = None, 0
            self._choose()  # begins a turn
        self.begin()

    def begin(self, after: int | None = None) -> None:
        """Begin a stretch, again if it was interrupted. after: the limit of the steps until now;
        None: it does not matter."""
        self._stretch = np.zeros((2, 3))
        self._settling = _CATCHING_UP if after == 0 != self.current else _SETTLING

    def add(self, seconds: float, tokens: int, has_prompts: bool) -> None:
        """Take in a step of the stretch. If the stretch ends, choose the limit of the next one."""
        self._used = time.monotonic()
        if self._settling:
            self._settling -= 1
            return
        self._stretch[int(has_prompts)] += (1, seconds, tokens)
        if self._stretch[:, 0].sum() >= self._steps:
            known = self._known[self.current]
            known *= _KEPT
            known += self._stretch
            before = self.current
            self._choose()
            self._say_switch()
            self.begin(before)

    def _choose(self) -> None:
        """Choose the best limit, and the one of the next stretch."""
        for limit in self._limits:
            if self._gain(limit) > _CLEARLY:
                self.best = limit
        if self._turn is None:
            self._until_turn -= self._steps
            if self._until_turn <= 0:
                self._turn = [limit for limit in self._limits if limit != self.best]
        elif not self._turn:
            self._turn = None
            lost_s = sum((1 - min(self._gain(n), 1.0)) * self._step_s(n) for n in self._limits)
            rare = lost_s * (self._steps + _CATCHING_UP) / _TURNS_COST
            rare /= self._step_s(self.best)
            self._until_turn = int(min(max(rare, _SOONEST_TURN), _RAREST_TURN))
        self.current = self._turn.pop(0) if self._turn else self.best

    def _say_switch(self) -> None:
        """Log if the best limit has become 0, or is no longer, since the last line. Says nothing
        before both ways are measured."""
        off, now = self.best == 0, time.monotonic()
        gain = max((self._gain(n) for n in self._limits if (n == 0) != off), default=0.0)
        if off == self._said_off or not gain or now < self._said_at + _SAY_S:
            return
        self._said_off, self._said_at = off, now
        _, seconds, tokens = self._known[self.best].sum(axis=0).tolist()
        speed, about = tokens / max(seconds, 1e-9), 2**self.size
        logger.info(
            "SSD: off at about %d request%s: %.1f tokens/s without draft tokens, %.1f with them"
            if off
            else "SSD: on at about %d request%s: %.1f tokens/s with draft tokens, %.1f without",
            *(about, "s" * (about > 1), speed, speed * gain),
        )

    def _step_s(self, limit: int) -> float:
        """Return the mean seconds of a step."""
        steps, seconds, _ = self._known[limit].sum(axis=0).tolist()
        return seconds / steps if seconds else 1.0

    def _gain(self, limit: int) -> float:
        """Return how many times the best limit's goodput this one has, 0 if that is not known."""
        (steps, *this), (best_steps, *best) = self._known[limit].T, self._known[self.best].T
        weights = np.minimum(steps, best_steps)
        compared = weights > 0
        if not compared.any():
            return 0.0
        goodput, usual = (tokens[compared] / seconds[compared] for seconds, tokens in (this, best))
        return float(np.average(goodput / np.maximum(usual, 1e-9), weights=weights[compared]))


class DraftLimits:
    """Call ``limit`` once a step. may_be_off: whether a step may be without draft tokens."""

    def __init__(self, may_be_off: bool = False):
        self._may_be_off = may_be_off
        self._classes: dict[int, _SizeClass] = {}  # by log2 of the requests
        self._class: _SizeClass | None = None  # of the last batch
        self._since_prompt = 0

    def limit(self, batch: int, has_prompts: bool, seconds: float, gained: int) -> int:
        """Return the most draft tokens of a row in a step of ``batch`` requests. has_prompts:
        whether it reads prompts. seconds, gained: what the step before it took, and the tokens of
        all requests that it verified."""
        self._since_prompt = 0 if has_prompts else self._since_prompt + 1
        size = log2(max(batch, 1))
        if self._class is not None and abs(size - self._class.size) <= _SAME_SIZE:
            self._class.add(seconds, gained, self._since_prompt <= _AFTER_PROMPT)
        else:
            self._class = self._of_size(round(size))
            self._class.enter()
        return self._class.current

    def _of_size(self, size: int) -> _SizeClass:
        """Return the size class. A new one begins with what is best for batches of a like size."""
        if size not in self._classes:
            may_be_off = self._may_be_off and 2**size >= _LARGE
            limits = [MOST_DRAFTS, 0] if may_be_off else [MOST_DRAFTS]
            nearest = min(self._classes, key=lambda other: abs(other - size), default=None)
            best = MOST_DRAFTS if nearest is None else self._classes[nearest].best
            self._classes[size] = _SizeClass(size, limits, best if best in limits else MOST_DRAFTS)
        return self._classes[size]
