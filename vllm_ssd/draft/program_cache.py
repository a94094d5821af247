"""The programs of a draft engine, one for each shape of batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from vllm_ssd.draft.budget import BranchBudget, RoundCost
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.programs import Feed, Grow
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table.publisher import Publisher

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # requests
CHUNKS = (16, 64, 256, 1024, 4096)  # tokens
_TRIAL_CONTEXT = 1000  # tokens; what a round costs is measured at this length


class ProgramCache:
    """Programs by size. Recorded as graphs they have the sizes of ``BATCHES`` and ``CHUNKS``."""

    def __init__(
        self,
        model: DraftModel,
        publisher: Publisher,
        policy: DraftPolicy,
        budget: BranchBudget,
        max_requests: int,
    ):
        self._model, self._publisher, self._policy = model, publisher, policy
        self._budget = budget
        self._recorded = model.attention.graphs
        self._feeds: dict[tuple[int, int, int], Feed] = {}
        self._grows: dict[tuple[int, int, bool, bool], Grow] = {}
        # Batches of greedy requests only have programs of their own.
        self._sampled = (False, True) if policy.top_m else (False,)
        largest = min(max_requests, BATCHES[-1])
        self._batches = [b for b in BATCHES if b < largest] + [largest]
        self._chunks = [c for c in CHUNKS if c < policy.chunk] + [policy.chunk]

    @property
    def max_batch(self) -> int:
        """Requests that fit one program."""
        return self._batches[-1]

    def batch(self, requests: int) -> int:
        """The batch size of the program that serves ``requests`` requests."""
        if not self._recorded:
            return requests
        return next(b for b in self._batches if b >= requests)

    def glue(self, batch: int, branches: int) -> Feed:
        """Shows bonus and drafts, and predicts ``branches`` outcomes of each request."""
        return self._feed(batch, self._policy.k + 1, branches)

    def chunk(self, tokens: int) -> Feed:
        """Shows ``tokens`` tokens of one request."""
        size = next(c for c in self._chunks if c >= tokens) if self._recorded else tokens
        return self._feed(1, size, 0)

    def branches(self, batch: int, branches: int, sampled: bool) -> Grow:
        """Grows ``branches`` branches of each request."""
        return self._grow(batch, branches, False, sampled)

    def fallbacks(self, requests: int, sampled: bool) -> Grow:
        """Grows fallbacks of ``requests`` requests."""
        return self._grow(self.batch(requests), 1, True, sampled)

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Run every program once, without anything to publish. Where programs can be recorded,
        record them all, and measure the microseconds of a round. progress: is told in words."""
        if not self._recorded:
            for program in [*self._rounds(1), self.chunk(self._policy.chunk)]:
                program.try_out(1)
                program.run()
            return
        pool = torch.cuda.graph_pool_handle()
        context = min(_TRIAL_CONTEXT, self._model.max_len // 2)
        for number, batch in enumerate(self._batches):
            for program in self._rounds(batch):
                program.try_out(context)
                program.run.record(pool)
            progress(f"draft: rounds recorded for {number + 1} of {len(self._batches)} batch sizes")
            if self._policy.branches:
                self._measure(batch, context)
        for size in self._chunks:
            self.chunk(size).try_out(1)
            self.chunk(size).run.record(pool)

    def _rounds(self, batch: int) -> list[Feed | Grow]:
        programs: list[Feed | Grow] = []
        if self._policy.branches:
            for branches in self._budget.sizes(batch):
                programs.append(self.glue(batch, branches))
                programs += [self.branches(batch, branches, s) for s in self._sampled]
        if self._policy.fallbacks:
            programs += [self._grow(batch, 1, True, sampled) for sampled in self._sampled]
        return programs

    def _measure(self, batch: int, context: int) -> None:
        for branches in self._budget.sizes(batch):
            glue = self.glue(batch, branches)
            grow = self.branches(batch, branches, self._sampled[-1])  # which takes longer
            glue_us = glue.run.measure_us(partial(glue.try_out, context))
            step_us = grow.run.measure_us(partial(grow.try_out, context))
            self._budget.cost_us[batch, branches] = RoundCost(glue_us, step_us)

    def _feed(self, batch: int, queries: int, branches: int) -> Feed:
        key = (batch, queries, branches)
        if key not in self._feeds:
            self._feeds[key] = Feed(self._model, self._publisher, *key)
        return self._feeds[key]

    def _grow(self, batch: int, branches: int, fallbacks: bool, sampled: bool) -> Grow:
        key = (batch, branches, fallbacks, sampled and bool(self._policy.top_m))
        if key not in self._grows:
            self._grows[key] = Grow(
                self._model, self._publisher, batch, branches, self._policy, *key[2:]
            )
        return self._grows[key]
