"""Measures under Model Runner V2 whether rows should have draft tokens: all of them, or none.

On a GPU, arithmetic limits full batches. There, each draft token makes the step longer.

A limit is followed for a *stretch* of steps, which measures its goodput: tokens verified a second.
Most stretches follow the better limit. At times the other one gets a stretch, a *turn*. Turns are
as rare as what they cost demands. Batches of different size are measured apart. Steps with prompts
take longer and come by chance. So they are compared with other steps that have prompts.
"""

from __future__ import annotations

import time
from math import log2

import numpy as np

from vllm_ssd.log import get_logger

logger = get_logger(__name__)

MOST_DRAFTS = 16  # most draft tokens of a row, whatever k is

# A stretch has _STEPS measured steps. A turn without draft tokens ends after _FEW_STEPS, if these
# have less than the share _HOPELESS of the usual goodput. Not measured: _SETTLING steps before
# them, which still show the limit before. After a stretch without draft tokens, these are
# _CATCHING_UP steps, in which the draft reads what it missed. _AFTER_PROMPT steps after a prompt
# may still take longer for it, because vLLM schedules ahead.
_STEPS, _FEW_STEPS, _HOPELESS, _SETTLING, _CATCHING_UP, _AFTER_PROMPT = 12, 4, 0.75, 4, 16, 2
# Share of the time that turns may cost, and the fewest and the most steps between two of them.
_TURNS_COST, _SOONEST_TURN, _RAREST_TURN = 0.02, 64, 2048
_KEPT = 0.6  # weight of a limit's earlier stretches against a new one
_LONGEST = 20  # usual steps that a step counts as at most, so that a pause soon counts no more
_CLEARLY = 1.02  # factor by which another limit must be better to replace the best one
# Batches of this number of requests and more may go without draft tokens.
_LARGE = 12
# Batches belong to one size class if they differ by less than this power of two.
_SAME_SIZE = 0.75
_SAY_S = 10.0  # between two log lines of a size class
_STALE_S = 10.0  # a size class without batches for so long tries draft tokens at once


def most_that_fit(budget: int, requests: int) -> int:
    """Return how many draft tokens each of these requests may have in steps of ``budget`` tokens.
    With more, vLLM leaves out the last requests of its list, step after step. Then the size of a
    batch would also depend on the limit, and no two limits would be measured at the same size."""
    return max(budget // max(requests, 1) - 1, 0)


class _SizeClass:
    """The measurements for batches of about ``2**size`` requests, and the current stretch."""

    def __init__(self, size: int, best: int):
        self.size = size
        self.best = self.current = best
        # By limit: float64 [2, 3] of steps, seconds and tokens, first without prompts, then with.
        self._known = {limit: np.zeros((2, 3)) for limit in (MOST_DRAFTS, 0)}
        self._until_turn = 0  # steps of the best limit
        self._said_off, self._said_at = False, float("-inf")
        self._used = time.monotonic()
        self.begin(after=0)

    def enter(self) -> None:
        """Begin anew after batches of other sizes. A burst of new requests may have taught that
        drafts do not pay, and be over."""
        if time.monotonic() > self._used + _STALE_S:
            self.current = MOST_DRAFTS
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
        seconds = min(seconds, _LONGEST * _step_s(self._known[self.best]))
        self._stretch[int(has_prompts)] += (1, seconds, tokens)
        steps = self._stretch[:, 0].sum()
        may_end = self.current < self.best and steps >= _FEW_STEPS
        if steps >= _STEPS or (may_end and 0 < self._gain(self._stretch) < _HOPELESS):
            self._known[self.current] = self._known[self.current] * _KEPT + self._stretch
            before = self.current
            self._choose()
            self._say_switch()
            self.begin(before)

    def _choose(self) -> None:
        """Choose the best limit, and the one of the next stretch."""
        was_turn = self.current != self.best
        for limit, steps in self._known.items():  # 0 is last: if each seems better, it wins
            if self._gain(steps) > _CLEARLY:
                self.best = limit
        self.current = self.best
        if was_turn:
            tried = self._known[_other(self.best)]
            lost_s = (1 - min(self._gain(tried), 1.0)) * _step_s(tried)
            rare = lost_s * (_STEPS + _CATCHING_UP) / _TURNS_COST / _step_s(self._known[self.best])
            self._until_turn = int(min(max(rare, _SOONEST_TURN), _RAREST_TURN))
        else:
            self._until_turn -= _STEPS
            if self._until_turn <= 0:
                self.current = _other(self.best)

    def _say_switch(self) -> None:
        """Log if the best limit has become 0, or is no longer, since the last line. Says nothing
        before both ways are measured."""
        off, now = self.best == 0, time.monotonic()
        gain = self._gain(self._known[_other(self.best)])
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

    def _gain(self, measured: np.ndarray) -> float:
        """Return how many times the best limit's goodput these steps have, 0 if it is unknown."""
        (steps, *this), (best_steps, *best) = measured.T, self._known[self.best].T
        weights = np.minimum(steps, best_steps)
        compared = weights > 0
        if not compared.any():
            return 0.0
        goodput, usual = (tokens[compared] / seconds[compared] for seconds, tokens in (this, best))
        return float(np.average(goodput / np.maximum(usual, 1e-9), weights=weights[compared]))


def _other(limit: int) -> int:
    return 0 if limit else MOST_DRAFTS


def _step_s(measured: np.ndarray) -> float:
    """Return the mean seconds of a step."""
    steps, seconds, _ = measured.sum(axis=0).tolist()
    return seconds / steps if seconds else 1.0


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
            if self._class is not None:
                self._class.enter()
        return MOST_DRAFTS if self._class is None else self._class.current

    def _of_size(self, size: int) -> _SizeClass | None:
        """Return the size class, None where all steps have draft tokens. A new one begins with
        what is best for batches of a like size."""
        if not self._may_be_off or 2**size < _LARGE:
            return None
        if size not in self._classes:
            like = min(self._classes.values(), key=lambda each: abs(each.size - size), default=None)
            self._classes[size] = _SizeClass(size, like.best if like else MOST_DRAFTS)
        return self._classes[size]
