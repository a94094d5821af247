"""Runs the pieces of work that the engine has chosen and reserved KV memory for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.growing_tree import GrowingTree
from vllm_ssd.draft.in_flight import InFlight
from vllm_ssd.draft.moves import Move
from vllm_ssd.draft.program_cache import ProgramCache
from vllm_ssd.draft.programs import Draft, Feed
from vllm_ssd.draft.request import DraftRequest, Phase
from vllm_ssd.draft.running_batch import RunningBatch
from vllm_ssd.draft.sampling import uniforms
from vllm_ssd.table import FALLBACK


class Executor:
    """Each method starts a piece of work and leaves the requests in their state after it, although
    a GPU may still run it."""

    def __init__(
        self, draft: Draft, programs: ProgramCache, budget: BranchBudget, in_flight: InFlight
    ):
        self._attention = draft.model.attention
        self.growing = RunningBatch(programs, draft.policy)
        self._programs = programs
        self._budget = budget
        self._states = draft.states
        self._in_flight = in_flight
        self._policy = draft.policy

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
            program.fill(parts)
            program.run()
        for request in requests:
            request.name_kv()

    def glue(
        self, requests: Sequence[DraftRequest], branches: int, has_room: Sequence[bool]
    ) -> None:
        """Show the model what it has not seen of the drafts being verified, predict ``branches``
        outcomes of each request and plant a branch for each. has_room: for each request, whether KV
        is reserved for its branches, too; without it nothing is predicted."""
        size, unfed = self._programs.batch(len(requests)), [request.unfed for request in requests]
        verified = [self._states.verified(r.seat, 1 + len(r.drafts)) for r in requests]
        program = self._programs.predict(size, branches)
        with self._in_flight.timed("glue"):
            for feed, rows in self._programs.feeds(unfed):
                parts = [requests[row].feed(unfed[row]) for row in rows]
                kept = [verified[row][len(requests[row].states) :] for row in rows]
                feed.fill(parts, kept)
                feed.run()
            # What is predicted is chosen while a GPU already works.
            fan_outs = self._budget.fan_outs(branches, requests)
            each = zip(requests, fan_outs.counts.tolist(), verified, has_room)
            program.fill([request.predict(*its) for request, *its in each], fan_outs)
            program.run()
        rows = [row for row, request in enumerate(requests) if request.predicted is not None]
        predicted = [requests[row] for row in rows]
        ends = np.array([[len(request.tokens)] for request in predicted])
        stamps = [request.next_stamp for request in predicted]
        if predicted:
            self._plant(predicted, fan_outs.accepted[rows] + ends, stamps)

    def fallback(self, requests: Sequence[DraftRequest]) -> None:
        """Predict outcomes that have come, and plant a branch for each."""
        outcomes = []
        for r in requests:
            home, r.branch = self._states.homes[r.seat, 0], 0
            outcomes.append((r.where, r.stamp | FALLBACK, r.accepted, r.tokens[-1], home))
        program = self._programs.fallbacks
        program.fill(outcomes)
        program.run()
        parents = np.array([[request.fed] for request in requests])
        self._plant(requests, parents, [stamp for _, stamp, *_ in outcomes])

    def _plant(
        self, requests: Sequence[DraftRequest], parents: NDArray[np.int64], stamps: Sequence[int]
    ) -> None:
        """Let a tree grow for each request. parents: int64 [requests, branches], the tokens that
        each branch continues; stamps: of their predictions."""
        blocks, linear = [r.table.blocks for r in requests], [r.fed for r in requests]
        trees = self._attention.plant(blocks, linear, parents, self._policy.tree_steps)
        if any(request.temperature for request in requests):
            # The bonus is one place before the first draft.
            numbers = uniforms([r.seed for r in requests], parents + 1, self._policy.k)
            self._states.uniforms[[r.seat for r in requests], : parents.shape[1]] = numbers
        planted = [
            GrowingTree(
                *(tree, r.where, stamp, r.seat, r.temperature, r.served.live),
                awaited=r.phase is not Phase.DECIDING,
            )
            for r, tree, stamp in zip(requests, trees, stamps)
        ]
        for request, grown in zip(requests, planted):
            request.tree = grown
        self.growing.add(planted)

    def grow(self) -> None:
        """Start one more step of all trees."""
        with self._in_flight.timed("branch"):
            self.growing.grow()
