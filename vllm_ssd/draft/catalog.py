"""The programs of a draft engine, for every size of batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.outcomes import shrink
from vllm_ssd.draft.programs import Feed, Grow
from vllm_ssd.draft.publish import Publisher
from vllm_ssd.draft.spec import DraftPolicy

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CHUNKS = (16, 64, 256, 1024, 4096)


class Catalog:
    """Programs by size. Where they are recorded as graphs, sizes are rounded up to a few."""

    def __init__(
        self,
        model: DraftModel,
        publisher: Publisher,
        policy: DraftPolicy,
        max_requests: int,
    ):
        self._model, self._publisher, self._policy = model, publisher, policy
        self._recorded = model.attention.graphs
        self._feeds: dict[tuple[int, int], Feed] = {}
        self._grows: dict[tuple[int, bool], Grow] = {}
        if self._recorded:
            self._batches = [b for b in BATCHES if b < max_requests] + [max_requests]
            self._batches = [b for b in self._batches if b <= BATCHES[-1]]
            self._chunks = [c for c in CHUNKS if c < policy.chunk] + [policy.chunk]

    @property
    def max_batch(self) -> int:
        """Requests that fit one program."""
        return BATCHES[-1]

    def fan_out(self, requests: int) -> tuple[int, ...]:
        """Branches for each accepted length when so many requests are drafted for."""
        return shrink(self._policy.fan_out, self._policy.max_branches // self._batch(requests))

    def glue(self, requests: int) -> Feed:
        """Shows bonus and drafts of so many requests, and predicts their outcomes."""
        batch = self._batch(requests)
        return self._feed(batch, self._policy.k + 1, sum(self.fan_out(requests)))

    def chunk(self, tokens: int) -> Feed:
        """Shows so many tokens of one request."""
        size = next(c for c in self._chunks if c >= tokens) if self._recorded else tokens
        return self._feed(1, size, 0)

    def branches(self, requests: int) -> Grow:
        """Grows the branches of so many requests."""
        return self._grow(self._batch(requests), sum(self.fan_out(requests)), answers=False)

    def answers(self, requests: int) -> Grow:
        """Grows answers to so many requests."""
        return self._grow(self._batch(requests), 1, answers=True)

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Run everything once, with padding only, and record it where that is possible."""
        programs: list[Feed | Grow] = []
        for batch in self._batches if self._recorded else [1]:
            if self._policy.branches:
                programs += [self.glue(batch), self.branches(batch)]
            if self._policy.answer_depth:
                programs.append(self.answers(batch))
        for chunk in self._chunks if self._recorded else [self._policy.chunk]:
            programs.append(self.chunk(chunk))
        pool = torch.cuda.graph_pool_handle() if self._recorded else None
        for number, program in enumerate(programs):
            program.load_padding()
            if self._recorded:
                program.run.record(pool)
            else:
                program.run()
            progress(f"{number + 1} of {len(programs)} draft programs ready")

    def _batch(self, requests: int) -> int:
        if not self._recorded:
            return requests
        return next(b for b in self._batches if b >= requests)

    def _feed(self, batch: int, queries: int, branches: int) -> Feed:
        key = (batch, queries if not branches else 0)
        if key not in self._feeds:
            self._feeds[key] = Feed(self._model, self._publisher, batch, queries, branches)
        return self._feeds[key]

    def _grow(self, batch: int, branches: int, answers: bool) -> Grow:
        key = (batch, answers)
        if key not in self._grows:
            self._grows[key] = Grow(
                self._model, self._publisher, batch, branches, self._policy.k, answers
            )
        return self._grows[key]
