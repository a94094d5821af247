"""What the target waits for: with ``auto``, for as many drafts as ``yields.py`` finds worth it,
unless ``ways.py`` has measured that it is better to wait for everything or for nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import log2
from typing import Literal

from vllm_ssd.table import SpeculationTable
from vllm_ssd.target.steps import Steps
from vllm_ssd.target.ways import Way, Ways
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


@dataclass
class _Size:
    """What is known of batches of about one size."""

    steps: Steps
    ways: Ways
    reasoned: Depths | None = None  # at the last look


class Patience:
    """Decides for a ``WaitPolicy``, step by step."""

    def __init__(self, policy: WaitPolicy, table: SpeculationTable):
        self._policy = policy
        self._counters = table.target[0]
        self._yields = Yields(table)
        self._sizes: dict[int, _Size] = {}  # by size, as a power of 2
        self._size = -1  # of the last batch, about
        self._reasoned: dict[int, Depths] = {}  # by batch, until the next look
        self._steps = 0
        self._last = 0.0
        self._waited_us = 0

    def decide(self, batch: int, now: float | None = None) -> Depths:
        """For a step of so many requests whose outcomes are not counted yet; now: in seconds."""
        most, way = self._policy.min_depth, self._policy.on_miss
        if way == "auto":
            chosen = self._choose(batch, time.monotonic() if now is None else now)
            if chosen == "reasoned":
                return self._reason(batch)
            way = chosen
        most *= way == "wait"
        return Depths(most, most)

    def _choose(self, batch: int, now: float) -> Way:
        """Another step has ended."""
        waited_us = int(self._counters["wait_us"])
        took, waited_s = now - self._last, (waited_us - self._waited_us) / 1e6
        self._last, self._waited_us = now, waited_us
        self._steps += 1
        if self._steps % _RENEWED == 0:
            self._yields.renew(self._steps)
            self._reasoned.clear()
        exact = log2(max(batch, 1))
        if self._size >= 0 and abs(exact - self._size) <= _ABOUT:
            size = self._sizes[self._size]
            return size.ways.next(batch, size.steps.add(took, waited_s))
        self._size = round(exact)
        if self._size not in self._sizes:
            self._sizes[self._size] = _Size(Steps(), Ways(self._size, self._yields.tokens))
        size = self._sizes[self._size]
        size.steps.interrupted()
        size.ways.interrupted()
        return size.ways.way

    def _reason(self, batch: int) -> Depths:
        if batch not in self._reasoned:
            size = self._sizes[self._size]
            size.reasoned = self._yields.best(
                batch, self._policy.min_depth, size.steps.times(), size.reasoned
            )
            self._reasoned[batch] = size.reasoned
        return self._reasoned[batch]
