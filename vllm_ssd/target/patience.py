"""What the target waits for: with ``auto``, for as many drafts as ``yields.py`` finds worth it,
unless ``ways.py`` has measured that it is better to wait for everything or for nothing."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from math import log2
from typing import Literal

from vllm_ssd.table import SpeculationTable
from vllm_ssd.target.steps import Steps
from vllm_ssd.target.ways import Ways
from vllm_ssd.target.yields import Depths, Yields

# Steps between two looks at what drafts yield and cost.
_RENEWED = 16
# A batch is of about the size of the last one unless it is larger or smaller by more than this
# power of 2: while one of its requests still prefills, a batch is smaller by that.
_ABOUT = 0.75


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
        self._last_reasoned: dict[int, Depths] = {}  # by size
        self._by_size: defaultdict[int, Steps] = defaultdict(Steps)
        self._size = -1  # of the last batch, about, as a power of 2
        self._steps = 0
        self._last = 0.0
        self._waited_us = 0

    def decide(self, batch: int, now: float | None = None) -> Depths:
        """For a step of so many requests whose outcomes are not counted yet; now: in seconds."""
        most, way = self._policy.min_depth, self._policy.on_miss
        if way == "auto":
            took = self._time(batch, time.monotonic() if now is None else now)
            chosen = self._ways.next(self._size, took)
            if chosen == "reasoned":
                return self._reason(batch)
            way = chosen
        most *= way == "wait"
        return Depths(most, most)

    def _time(self, batch: int, now: float) -> float:
        """Another step has ended; what it counts for."""
        waited_us = int(self._counters["wait_us"])
        took = now - self._last if self._steps else 0.0
        if self._size < 0 or abs(log2(max(batch, 1)) - self._size) > _ABOUT:
            self._size = round(log2(max(batch, 1)))
            self._by_size[self._size].interrupted()
        elif self._steps:
            took = self._by_size[self._size].add(took, (waited_us - self._waited_us) / 1e6)
        self._steps += 1
        self._last, self._waited_us = now, waited_us
        if self._steps % _RENEWED == 0:
            self._yields.renew(self._steps)
            self._reasoned.clear()
        return took

    def _reason(self, batch: int) -> Depths:
        if batch not in self._reasoned:
            times, last = self._by_size[self._size].times(), self._last_reasoned.get(self._size)
            depths = self._yields.best(batch, self._policy.min_depth, times, last)
            self._reasoned[batch] = self._last_reasoned[self._size] = depths
        return self._reasoned[batch]
