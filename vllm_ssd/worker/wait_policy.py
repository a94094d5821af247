"""How long the target waits for drafts, and for which: what ``on_miss`` and ``max_wait_ms`` say."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vllm_ssd.protocol import SpeculationTable
from vllm_ssd.worker.wait_tuner import Limits, WaitPlan, WaitTuner


@dataclass(frozen=True)
class WaitPolicy:
    """on_miss: ``wait`` for all k drafts of every row, ``skip``: take what is there, or ``auto``:
    wait for what pays. max_wait_s: the longest wait of a step, in seconds."""

    on_miss: Literal["auto", "wait", "skip"]
    max_wait_s: float


class WaitPlanner:
    """Says before each step which drafts it waits for, and how many there may be."""

    def __init__(self, policy: WaitPolicy, table: SpeculationTable, limits: Limits = "nobody"):
        k = table.shape.k
        # Whether requests whose text the draft has yet to read wait for that, and first tokens for
        # anything: only where all rounds are alike.
        self.waits_for_texts = policy.on_miss == "wait"
        self._fixed = {"wait": WaitPlan(k, k), "skip": WaitPlan(0, 0)}.get(policy.on_miss)
        self._accepted = table.target[0]["accepted"]  # rounds by their number of accepted drafts
        self._gained = np.arange(1, k + 2)  # tokens of such a round
        self._tuner = WaitTuner(k, limits)

    def plan(self, batch: int, has_prompts: bool, undrafted: int = 0) -> WaitPlan:
        """For a step of ``batch`` requests, in which prompts are read if ``has_prompts``.
        undrafted: tokens so far of requests that the draft was not told of."""
        if self._fixed is not None:
            return self._fixed
        tokens = int(self._accepted @ self._gained) + undrafted
        return self._tuner.plan(batch, has_prompts, tokens, time.monotonic())
