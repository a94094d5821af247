"""What the target waits for, and whether a batch waits for answers to unpredicted outcomes.

An answer comes to one request and holds up all of them. Let a round of one request yield a tokens.
For a batch of n, m of which miss, it yields n * a with the answers and takes t + w, or
(n - m) * a + m without and takes t. What yields more a second is done. All is measured: a and t by
the target, w by the draft.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median_high
from typing import Literal

from vllm_ssd.table import SpeculationTable

# Rounds of which the middle one counts: engines pause and prompts take long.
_WINDOW = 15
# Verified rounds of which the mean yield counts.
_RENEWED_AFTER = 256


@dataclass(frozen=True)
class WaitPolicy:
    """on_miss: ``wait`` for the draft up to ``max_wait_s`` a round until ``min_depth`` drafts are
    there, or ``skip``: take what is there; ``auto``: wait, but for answers only where that pays.
    Branches that are late are late for all requests alike."""

    on_miss: Literal["auto", "wait", "skip"]
    min_depth: int
    max_wait_s: float


class Patience:
    """Decides for ``auto``. Until all is measured, a batch of one waits for answers."""

    def __init__(self, policy: WaitPolicy, table: SpeculationTable):
        self._policy = policy
        self._target, self._draft = table.target[0], table.draft[0]
        self._rounds: deque[float] = deque(maxlen=_WINDOW)
        self._last = (0.0, 0)  # when the last round was looked up, and what had been waited by then
        self._counted = (0, 0)  # verified rounds and their tokens, at the last renewal
        self._yield = 0.0

    def answers_in(self, batch: int, missed: int = 1) -> bool:
        """Whether to wait in a batch of which so many miss."""
        if self._policy.on_miss != "auto":
            return self._policy.on_miss == "wait"
        answer_us = self._answer_us()
        if not (self._yield and answer_us and self._rounds):
            return batch == 1
        round_us = median_high(self._rounds) * 1e6
        without = (batch - missed) * self._yield + missed
        return answer_us * without < missed * (self._yield - 1) * round_us

    def look(self, now: float | None = None) -> None:
        """A round is being looked up; now: in seconds."""
        if self._policy.on_miss != "auto":
            return
        now = time.monotonic() if now is None else now
        then, waited = self._last
        self._last = now, int(self._target["wait_us"])
        if then:
            self._rounds.append(max(0.0, now - then - (self._last[1] - waited) / 1e6))
        self._renew_yield()

    def _renew_yield(self) -> None:
        accepted = self._target["accepted"]
        rounds = int(accepted.sum())
        if rounds - self._counted[0] < _RENEWED_AFTER:
            return
        tokens = rounds + int(accepted @ range(len(accepted)))
        self._yield = (tokens - self._counted[1]) / (rounds - self._counted[0])
        self._counted = rounds, tokens

    def _answer_us(self) -> float:
        """What an answer takes, as the draft has counted it; 0 if it has not answered yet."""
        answers = int(self._draft["answer"])
        return int(self._draft["answer_us"]) / answers * self._policy.min_depth if answers else 0.0
