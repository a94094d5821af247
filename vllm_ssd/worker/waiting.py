"""Decides before each step which draft tokens the target waits for, and how many a row may have:
``on_miss`` and ``max_wait_ms``.

A missing draft token comes a step of the draft later, and all requests of the batch wait for it. It
is worth the wait if it brings more tokens in that time than the batch does on average. As long as
tokens are worth more than the average, each wait raises the average, until both are equal: there
the goodput is highest. Whether drafts pay at all is measured apart (``draft_limit.py``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import ceil, log
from typing import Literal, NamedTuple

import numpy as np

from vllm_ssd.log import get_logger
from vllm_ssd.table import SpeculationTable
from vllm_ssd.worker.draft_limit import MOST_DRAFTS, DraftLimits

logger = get_logger(__name__)

_ACCEPTANCE = 0.8  # of each draft token, assumed
# A fallback begins only after its outcome, so its first token takes as long as two. It is worth a
# wait only where this number of tokens would be without that.
_FALLBACK = 3
_NEWEST = 0.1  # weight of the newest step in the average


@dataclass(frozen=True)
class WaitPolicy:
    """The options for waiting. on_miss: ``wait`` for all k draft tokens of every row, ``skip``
    waiting, or ``auto``: wait for what pays. max_wait_s: the longest wait of a step, in seconds.
    may_be_off: whether a step may be without draft tokens."""

    on_miss: Literal["auto", "wait", "skip"]
    max_wait_s: float
    may_be_off: bool = False


class WaitPlan(NamedTuple):
    """Numbers of draft tokens. fallback: to wait for if the outcome was not predicted, until there
    is a fallback. branch: to wait for otherwise. drafts: the most that a row may have; 0: the
    target decodes without the draft."""

    branch: int
    fallback: int
    drafts: int = MOST_DRAFTS

    def at_most(self, drafts: int) -> WaitPlan:
        """Return the plan for rows that have no more draft tokens than these."""
        return WaitPlan(*(min(number, drafts) for number in self))


class WaitPlanner:
    """Call ``plan`` once a step."""

    def __init__(self, policy: WaitPolicy, table: SpeculationTable):
        self._k = k = table.shape.k
        # Whether requests wait until the draft has read their text, and whether their first tokens
        # wait: only with ``wait``, which treats all rounds alike.
        self.waits_for_texts = policy.on_miss == "wait"
        self._fixed = {"wait": WaitPlan(k, k), "skip": WaitPlan(0, 0)}.get(policy.on_miss)
        self._accepted = table.target[0]["accepted"]  # rounds by their number of accepted drafts
        self._gained = np.arange(1, k + 2)  # tokens of such a round
        self._draft = table.draft[0]
        self._limits = DraftLimits(policy.may_be_off)
        self._now, self._tokens = 0.0, 0
        self._mean_s = self._mean_tokens = 0.0  # of a step, of all requests

    def plan(self, batch: int, has_prompts: bool = False, undrafted: int = 0) -> WaitPlan:
        """Return the plan for a step of ``batch`` requests. has_prompts: whether it reads prompts.
        undrafted: tokens so far that the draft was not told of."""
        if self._fixed is None:
            try:
                return self._by_measurements(batch, has_prompts, undrafted)
            except Exception:  # costs speed, and must not end the target's step
                logger.exception("SSD: from now on, the target waits for no drafts")
                self._fixed = WaitPlan(0, 0)
        return self._fixed

    def _by_measurements(self, batch: int, has_prompts: bool, undrafted: int) -> WaitPlan:
        """Return the plan of ``auto``."""
        tokens = int(self._accepted @ self._gained) + undrafted
        now = time.monotonic()
        seconds, gained = now - (self._now or now), tokens - self._tokens
        self._now, self._tokens = now, tokens
        drafts = self._limits.limit(batch, has_prompts, seconds, gained)
        self._average(seconds, gained)
        worth = self._worth() if drafts else 0
        return WaitPlan(worth, worth if worth >= _FALLBACK else 0, drafts)

    def _average(self, seconds: float, gained: int) -> None:
        """Take in a step that has ended."""
        if self._mean_s:  # a pause or a prompt says little about the next step
            seconds = min(seconds, 2 * self._mean_s)
        weight = _NEWEST if self._mean_s else 1.0
        self._mean_s += weight * (seconds - self._mean_s)
        self._mean_tokens += weight * (gained - self._mean_tokens)

    def _worth(self) -> int:
        """Return how many tokens the batch waits for."""
        steps, took_us = int(self._draft["branch"]), int(self._draft["branch_us"])
        # The draft may be between two writes, and its side of the table may be damaged.
        if steps <= 0 or took_us <= 0 or not self._mean_s or self._mean_tokens <= 0:
            return self._k
        lost = took_us / steps / 1e6 * self._mean_tokens / self._mean_s  # in a step of the draft
        return min(max(ceil(log(lost) / log(_ACCEPTANCE)), 0), self._k)
