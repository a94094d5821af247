"""The programs of a draft engine, by size of batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import product, takewhile

import torch

from vllm_ssd.draft.budget import FEWEST, BranchBudget
from vllm_ssd.draft.moves import Moves
from vllm_ssd.draft.programs import Draft, Fallbacks, Feed, Grow, Predict
from vllm_ssd.draft.spec import TOKENS_IN_A_READ

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # requests
ROWS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # branches that grow together
CHUNKS = (16, 64, 256, 1024, 4096)  # tokens
_KEPT = 16  # programs of a kind that have any size
_TRIAL_CONTEXT = 1000  # tokens; kernels are tuned at this length
# How many times as long a step may take as one with one request's branches, so that all requests
# have more branches. On an H200, steps of 2 times and more left too few tokens in each branch.
_DEARER, _TRIALS = 1.6, 3

FeedPart = tuple[Feed, list[int]]
"""A feed, and which of several requests it is for, by their indices."""


class ProgramCache:
    """Programs by size. Programs that are recorded as graphs have the sizes of ``BATCHES``,
    ``ROWS`` and ``CHUNKS``, and any tile that the attention has for such rows."""

    def __init__(self, draft: Draft, budget: BranchBudget, seats: int):
        model, policy = draft.model, draft.policy
        self._model, self._policy, self._budget = model, policy, budget
        self._recorded = model.attention.graphs
        self._seats = seats
        # There are too many sizes to keep, and each has the masks of its last texts.
        kept = lru_cache(None if self._recorded else _KEPT)
        self._feed = kept(partial(Feed, draft))
        self._move = kept(partial(Moves, model.attention))
        # For a batch: predicts some outcomes of each request.
        self.predict = kept(partial(Predict, draft))
        self._grow = lru_cache(None if self._recorded else 1)(partial(Grow, draft))
        # Batches that have only greedy requests use programs of their own.
        self._sampled = (False, True) if policy.top_m else (False,)
        largest = min(seats, BATCHES[-1])
        self._batches = [b for b in BATCHES if b < largest] + [largest]
        own = max(policy.branches, 1)  # of a request
        most = max(min(seats * own, policy.max_branches), own)
        self._rows = [r for r in ROWS if r < most] + [most]
        model.attention.narrowest = min(own, FEWEST)
        sizes = [c for c in CHUNKS if c < policy.chunk] + [policy.chunk]
        together = [(min(policy.chunk // c, self._batches[-1]), c) for c in sizes]
        self._chunks = list(dict.fromkeys([(1, c) for c in sizes] + together))
        self.fallbacks = Fallbacks(draft, self.max_batch)

    @property
    def max_batch(self) -> int:
        """Requests that fit one program."""
        return self._batches[-1]

    def batch(self, requests: int) -> int:
        """The batch size of the program that serves ``requests`` requests."""
        if not self._recorded:
            return requests
        return next(b for b in self._batches if b >= requests)

    def feeds(self, counts: Sequence[int]) -> list[FeedPart]:
        """The feeds that show each request its bonus and drafts. counts: tokens to show of each
        request; 0 needs no feed. Single tokens get a feed of their own if that should be faster."""
        single = [row for row, count in enumerate(counts) if count == 1]
        several = [row for row, count in enumerate(counts) if count > 1]
        together = self._parts([sorted(single + several)], counts)
        return min(together, self._parts([single, several], counts), key=_reads)

    def chunk(self, wanted: Sequence[int]) -> Feed:
        """The feed that shows the most tokens of these requests, the first requests first; the
        smallest, if several show as many. wanted: tokens to show of each request."""
        round_size = self._policy.k + 1
        if self._recorded:
            together = self.batch(min(len(wanted), self.max_batch)), round_size
            shown = {
                (batch, size): sum(min(count, size) for count in wanted[:batch])
                for batch, size in [*self._chunks, together]
            }
            return self._feed(*min(shown, key=lambda shape: (-shown[shape], shape[0] * shape[1])))
        short = list(takewhile(lambda count: count <= round_size, wanted[: self.max_batch]))
        if short:
            return self._feed(len(short), max(short))
        return self._feed(1, min(wanted[0], self._policy.chunk))

    def moves(self, counts: Sequence[int]) -> Moves:
        """The program for copies within requests. counts: copies in each request."""
        most = self.batch(len(counts)) * (self._policy.k + 1)
        return self._move(most if self._recorded else sum(counts))

    def fitting(self, branches: Sequence[int]) -> int:
        """How many of these trees, the first ones, fit one program. branches: of each."""
        return self._model.attention.fitting(self._rows[-1], branches)

    def grow(self, branches: Sequence[int], sampled: bool) -> Grow:
        """The program that grows trees with these numbers of branches."""
        rows, widest = sum(branches), max(branches)
        if self._recorded:
            fitting, enough = self._model.attention.fitting, [r for r in self._rows if r >= rows]
            rows = next(r for r in enough if fitting(r, branches) == len(branches))
        return self._grow(rows, self._model.attention.tile(rows, widest), sampled)

    def warm_up(self) -> None:
        """Run every program once, without anything to publish. If programs can be recorded, record
        them all."""
        if not self._recorded:
            rows = max(self._budget.branches(1), 1)
            grows = [self._grow(rows, self._tiles(rows)[-1], s) for s in self._sampled]
            for program in [*self._rounds(1), *grows, self._feed(1, self._policy.chunk)]:
                program.try_out(1)
                program.run()
            self.fallbacks.fill(())
            self.fallbacks.run()
            self._choose_rows()
            return
        pool = torch.cuda.graph_pool_handle()
        context = min(_TRIAL_CONTEXT, self._model.max_len // 2)
        for rows in self._rows:
            for tile, sampled in product(self._tiles(rows), self._sampled):
                grow = self._grow(rows, tile, sampled)
                grow.try_out(context)
                grow.record(pool)
        self._choose_rows()
        for batch in self._batches:
            for program in self._rounds(batch):
                program.try_out(context)
                program.record(pool)
        for shape in self._chunks:
            self._feed(*shape).try_out(1)
            self._feed(*shape).record(pool)
        self.fallbacks.fill(())
        self.fallbacks.record(pool)

    def _choose_rows(self) -> None:
        """Let requests share as many branches as grow together in at most ``_DEARER`` times the
        time of one request's."""
        least = 0.0
        for rows in (rows for rows in self._rows if rows >= self._policy.branches):
            took_s = _seconds(self._grow(rows, self._tiles(rows)[-1], False), self._model.device)
            least = least or took_s
            if took_s > _DEARER * least:
                break
            self._budget.rows = rows

    def _tiles(self, rows: int) -> list[int]:
        """Of plans for ``rows``, for trees of any width."""
        widest = min(rows, max(self._policy.branches, 1))
        return sorted({self._model.attention.tile(rows, w) for w in range(1, widest + 1)})

    def _rounds(self, batch: int) -> list[Feed | Moves | Predict]:
        tokens = self._policy.k + 1
        programs: list[Feed | Moves | Predict] = [self._feed(batch, tokens)]
        if self._policy.branches:
            programs += [self._feed(batch, 1), self._move(batch * tokens)]
            # The draft may serve more requests than are glued together.
            programs += [self.predict(batch, n) for n in self._budget.shares(batch, self._seats)]
        return programs

    def _parts(self, groups: Sequence[list[int]], counts: Sequence[int]) -> list[FeedPart]:
        """A feed for each of these groups of requests that is not empty."""
        parts = []
        for rows in filter(None, groups):
            queries = max(counts[row] for row in rows)
            if self._recorded and queries > 1:
                queries = self._policy.k + 1
            parts.append((self._feed(self.batch(len(rows)), queries), rows))
        return parts


def _seconds(program: Grow, device: torch.device) -> float:
    """The shortest time of some runs."""
    times = []
    for _ in range(_TRIALS):
        program.try_out(1)
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        program.run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def _reads(parts: Sequence[FeedPart]) -> float:
    """The time that these feeds should take, in times of reading the weights."""
    return sum(max(1.0, feed.batch * feed.queries / TOKENS_IN_A_READ) for feed, _ in parts)
