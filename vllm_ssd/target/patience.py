"""What the target waits for, and whether a batch waits for answers to unpredicted outcomes.

An answer comes to one request and holds up all of them. Let rounds whose drafts are a branch, an
answer, or the draft's at all yield b, a and n tokens. A step of a batch of s requests, m of which
miss, yields (s - m) * b + m * a in t + w with the answers, or (s - m) * b + m * n in t without.
What yields more a second is done. All is measured: the yields and t by the target, w by the draft.
The yield of what is not being done is measured by trials, as texts change.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median_high
from typing import Literal

from vllm_ssd.table import ANSWER, BRANCH, NOWHERE, SOURCES, SpeculationTable

# Rounds of which the middle one counts: engines pause and prompts take long.
_WINDOW = 15
# So many verified rounds of a source renew its yield, in which about so many count.
_RENEWED_AFTER = 16
_MEMORY = 64
# Once in so many steps, what is not being done is done for so many rounds.
_TRIAL_EVERY = 256
_TRIAL = 4


@dataclass(frozen=True)
class WaitPolicy:
    """on_miss: ``wait`` for the draft up to ``max_wait_s`` a round until ``min_depth`` drafts are
    there, or ``skip``: take what is there; ``auto``: wait, but for answers only where that pays.
    Branches that are late are late for all requests alike."""

    on_miss: Literal["auto", "wait", "skip"]
    min_depth: int
    max_wait_s: float


class Patience:
    """Decides for ``auto``."""

    def __init__(self, policy: WaitPolicy, table: SpeculationTable):
        self._policy = policy
        self._target, self._draft = table.target[0], table.draft[0]
        self._durations: deque[float] = deque(maxlen=_WINDOW)
        self._last = (0.0, 0)  # when the last round was looked up, and what had been waited by then
        self._looks = 0
        # By the source of drafts: rounds and tokens at the last renewal, tokens a round, and
        # rounds when the trials began.
        self._counted = [(0, 0)] * len(SOURCES)
        self._yields: list[float | None] = [None] * len(SOURCES)
        self._tried = [0] * len(SOURCES)
        self._rounds_by = [0] * len(SOURCES)  # as of the last look

    def answers_in(self, batch: int, missed: int = 1) -> bool:
        """Whether to wait in a batch of which so many miss."""
        if self._policy.on_miss != "auto":
            return self._policy.on_miss == "wait"
        waits = self._pays(batch, missed)
        other = NOWHERE if waits else ANSWER
        on_trial = self._rounds_by[other] - self._tried[other] < _TRIAL
        return waits != on_trial

    def look(self, now: float | None = None) -> None:
        """Rounds are about to be looked up, their outcomes not counted yet; now: in seconds."""
        if self._policy.on_miss != "auto":
            return
        now = time.monotonic() if now is None else now
        then, waited = self._last
        self._last = now, int(self._target["wait_us"])
        if then:
            self._durations.append(max(0.0, now - then - (self._last[1] - waited) / 1e6))
        self._looks += 1
        self._rounds_by = self._target["rounds_by"].tolist()
        if self._looks % _TRIAL_EVERY == 0:
            self._tried = self._rounds_by
        self._renew_yields()

    def _pays(self, batch: int, missed: int) -> bool:
        """Whether waiting does, as far as is known; until all is, a batch of one waits."""
        branch, answer, nothing = (self._yields[source] for source in (BRANCH, ANSWER, NOWHERE))
        wait_us = self._wait_us()
        if branch is None or answer is None or nothing is None or not wait_us:
            return batch == 1
        round_us = median_high(self._durations) * 1e6
        without = (batch - missed) * branch + missed * nothing
        return wait_us * without < missed * (answer - nothing) * round_us

    def _renew_yields(self) -> None:
        for source in SOURCES:
            rounds = self._rounds_by[source]
            tokens = int(self._target["tokens_by"][source])
            rounds_before, tokens_before = self._counted[source]
            new = rounds - rounds_before
            if new >= _RENEWED_AFTER:
                fresh = (tokens - tokens_before) / new
                known = self._yields[source]
                share = new / (new + _MEMORY)
                self._yields[source] = fresh if known is None else known + share * (fresh - known)
                self._counted[source] = rounds, tokens

    def _wait_us(self) -> float:
        """For an answer, as the draft has counted it; 0 if it has not answered yet. One step more
        than it has drafts: the draft is at something else when an outcome surprises it."""
        answers = int(self._draft["answer"])
        step_us = int(self._draft["answer_us"]) / answers if answers else 0.0
        return step_us * (self._policy.min_depth + 1)
