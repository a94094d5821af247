"""What the target waits for: with ``auto``, for as many drafts as ``yields.py`` finds worth it,
unless ``ways.py`` has measured that it is better to wait for everything or for nothing."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median_high
from typing import Literal

from vllm_ssd.table import SpeculationTable
from vllm_ssd.target.ways import Ways
from vllm_ssd.target.yields import Depths, Yields

# Steps between two looks at what drafts yield and cost, and those that say how long a step is.
_RENEWED, _TIMED = 16, 32


@dataclass(frozen=True)
class WaitPolicy:
    """on_miss: ``wait`` for the draft up to ``max_wait_s`` a round until ``min_depth`` drafts are
    there, or ``skip``: take what is there; ``auto``: wait for as many as pay, up to min_depth."""

    on_miss: Literal["auto", "wait", "skip"]
    min_depth: int
    max_wait_s: float


class Patience:
    """Decides for a ``WaitPolicy``, step by step."""

    def __init__(self, policy: WaitPolicy, table: SpeculationTable):
        self._policy = policy
        self._counters = table.target[0]
        self._yields = Yields(table)
        self._ways = Ways(self._yields.tokens)
        self._reasoned: dict[int, Depths] = {}  # by batch, until the next look
        self._steps = 0
        self._last = 0.0
        self._waited_us = 0
        self._without_wait = deque([0.0], _TIMED)  # seconds a step

    def decide(self, batch: int, now: float | None = None) -> Depths:
        """For a step of so many requests whose outcomes are not counted yet; now: in seconds."""
        most, way = self._policy.min_depth, self._policy.on_miss
        if way == "auto":
            took = self._time(time.monotonic() if now is None else now)
            chosen = self._ways.next(batch, took)
            if chosen == "reasoned":
                return self._reason(batch)
            way = chosen
        most *= way == "wait"
        return Depths(most, most)

    def _time(self, now: float) -> float:
        """Another step has ended; how long it took."""
        waited_us = int(self._counters["wait_us"])
        took = now - self._last if self._steps else 0.0
        if self._steps:
            self._without_wait.append(took - (waited_us - self._waited_us) / 1e6)
        self._steps += 1
        self._last, self._waited_us = now, waited_us
        if self._steps % _RENEWED == 0:
            self._yields.renew(self._steps)
            self._reasoned.clear()
        return took

    def _reason(self, batch: int) -> Depths:
        if batch not in self._reasoned:
            verify_s = max(median_high(self._without_wait), 0.0)
            best = self._yields.best(batch, self._policy.min_depth, verify_s)
            self._reasoned[batch] = best
        return self._reasoned[batch]
