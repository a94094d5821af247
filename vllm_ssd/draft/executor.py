"""Runs the pieces of work that the engine has chosen and reserved KV memory for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_ssd.draft.in_flight import InFlight
from vllm_ssd.draft.moves import Move
from vllm_ssd.draft.program_cache import FeedPart, ProgramCache
from vllm_ssd.draft.programs import NOWHERE, Feed, is_sampled
from vllm_ssd.draft.request import DraftRequest, Glue
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.draft.tree_batch import TreeBatch


class Executor:
    """Each method starts a piece of work and leaves the requests in their state after it, although
    a GPU may still run it."""

    def __init__(
        self,
        programs: ProgramCache,
        in_flight: InFlight,
        policy: DraftPolicy,
    ):
        self._programs = programs
        self._in_flight = in_flight
        self._policy = policy

    def move(self, moves: Sequence[Move]) -> None:
        """Copy keys and values within requests: at most the tokens of a round in each request."""
        most = self._programs.max_batch
        for first in range(0, len(moves), most):
            some = moves[first : first + most]
            program = self._programs.moves([len(move.targets) for move in some])
            program.fill(some)
            program.run()

    def feed(self, program: Feed, requests: Sequence[DraftRequest], counts: Sequence[int]) -> None:
        """Show the model the next tokens of each request. counts: tokens of each request."""
        parts = [request.feed(count) for request, count in zip(requests, counts)]
        with self._in_flight.timed("prefill", sum(counts)):
            program.fill([chunk for chunk, _ in parts], [tokens for _, tokens in parts])
            program.run()

    def glue(self, glues: Sequence[Glue], feeds: Sequence[FeedPart], branches: int) -> TreeBatch:
        """Show the model what it has not seen of the drafts being verified, predict ``branches``
        outcomes of each request and plant a branch for each. feeds: programs that show it, and for
        which glues."""
        size = self._programs.batch(len(glues))
        program = self._programs.predict(size, branches)
        with self._in_flight.timed("glue"):
            for feed, rows in feeds:
                part = [glues[row] for row in rows]
                feed.fill([g.chunk for g in part], [g.tokens for g in part], [g.kept for g in part])
                feed.run()
            program.fill([glue.prediction for glue in glues])
            program.run()
        slots = [
            glue.request.publish_slot(glue.request.next_stamp, glue.tree, self._policy.k)
            if glue.tree
            else NOWHERE
            for glue in glues
        ]
        batch = TreeBatch(
            self._programs.branches(size, branches, is_sampled(slots)),
            [glue.tree for glue in glues],
            slots,
            program.bonus[: len(glues) * branches].clone(),
        )
        for glue, row in zip(glues, batch.rows()):
            glue.request.predicted, glue.request.ahead = glue.prediction, row
        return batch

    def fallback(self, requests: Sequence[DraftRequest]) -> TreeBatch:
        """Plant a tree of one branch at each bonus; these outcomes were not predicted."""
        k = self._policy.k
        trees = [request.plant([len(request.fed)], self._policy.tree_steps) for request in requests]
        slots = [r.publish_slot(r.stamp, tree, k) for r, tree in zip(requests, trees)]
        batch = TreeBatch(
            self._programs.fallbacks(len(requests), is_sampled(slots)),
            [*trees],
            slots,
            torch.tensor([request.tokens[-1] for request in requests]),
        )
        for request, row in zip(requests, batch.rows()):
            request.fallback = row
        return batch

    def grow(self, batch: TreeBatch, kind: str) -> None:
        """Start one more step of a batch. kind: what to count it as."""
        with self._in_flight.timed(kind):
            batch.grow()
