"""Decides how long, and for which draft tokens, the target waits: ``on_miss``, ``max_wait_ms``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vllm_ssd.protocol import SpeculationTable
from vllm_ssd.worker.wait_tuner import Limits, WaitPlan, WaitTuner


@dataclass(frozen=True)
class WaitPolicy:
    """The options for waiting. on_miss: ``wait`` for all k draft tokens of every row, ``skip``
    waiting, or ``auto``: wait for what pays. max_wait_s: the longest wait of a step, in seconds."""

    on_miss: Literal["auto", "wait", "skip"]
    max_wait_s: float


class WaitPlanner:
    """Chooses before each step which draft tokens it waits for, and how many it may have."""

    def __init__(self, policy: WaitPolicy, table: SpeculationTable, limits: Limits = "nobody"):
        k = table.shape.k
        # Whether requests wait until the draft has read their text, and whether their first tokens
        # wait: only with ``wait``, which treats all rounds alike.
        self.waits_for_texts = policy.on_miss == "wait"
        self._fixed = {"wait": WaitPlan(k, k), "skip": WaitPlan(0, 0)}.get(policy.on_miss)
        self._accepted = table.target[0]["accepted"]  # rounds by their number of accepted drafts
        self._gained = np.arange(1, k + 2)  # tokens of such a round
        self._tuner = WaitTuner(k, limits)

    def plan(self, batch: int, has_prompts: bool, undrafted: int = 0) -> WaitPlan:
        """Return the plan for a step of ``batch`` requests. has_prompts: whether it reads prompts.
        undrafted: tokens so far that the draft was not told of."""
        if self._fixed is not None:
            return self._fixed
        tokens = int(self._accepted @ self._gained) + undrafted
        return self._tuner.plan(batch, has_prompts, tokens, time.monotonic())
