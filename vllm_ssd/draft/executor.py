"""Runs the pieces of work that the engine has chosen and reserved KV memory for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssd.draft.attention.masks import Tree
from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.in_flight import InFlight
from vllm_ssd.draft.moves import Move
from vllm_ssd.draft.program_cache import ProgramCache
from vllm_ssd.draft.programs import Destinations, Feed
from vllm_ssd.draft.random_numbers import uniforms
from vllm_ssd.draft.request import DraftRequest
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.draft.tree_batch import TreeBatch


class Executor:
    """Each method starts a piece of work and leaves the requests in their state after it, although
    a GPU may still run it."""

    def __init__(
        self,
        programs: ProgramCache,
        budget: BranchBudget,
        states: HiddenStates,
        in_flight: InFlight,
        policy: DraftPolicy,
    ):
        self._programs = programs
        self._budget = budget
        self._states = states
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
        for request in requests:
            request.name_kv()

    def glue(
        self, requests: Sequence[DraftRequest], branches: int, has_room: Sequence[bool]
    ) -> TreeBatch:
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
                feed.fill([chunk for chunk, _ in parts], [tokens for _, tokens in parts], kept)
                feed.run()
            # What is predicted is chosen while a GPU already works.
            fan_outs = self._budget.fan_outs(branches, size, [r.top_probs for r in requests])
            each = zip(requests, fan_outs.counts.tolist(), verified, has_room)
            program.fill([request.predict(*its) for request, *its in each], fan_outs)
            program.run()
        parents = fan_outs.accepted + [[len(request.tokens)] for request in requests]
        trees = [
            request.plant(row, self._policy.tree_steps) if request.predicted else None
            for request, row in zip(requests, parents.tolist())
        ]
        stamps = [request.next_stamp for request in requests]
        destinations = self._destinations(requests, trees, parents, stamps)
        batch = TreeBatch(
            self._programs.branches(size, branches, destinations.uniforms is not None),
            trees,
            destinations,
            program.bonus[: len(requests) * branches].clone(),
        )
        for request, row in zip(requests, batch.rows()):
            request.ahead = row
        return batch

    def fallback(self, requests: Sequence[DraftRequest]) -> TreeBatch:
        """Plant a tree of one branch at each bonus; these outcomes were not predicted."""
        parents = np.array([[request.fed] for request in requests])
        trees = [request.plant([request.fed], self._policy.tree_steps) for request in requests]
        stamps = [request.stamp for request in requests]
        destinations = self._destinations(requests, trees, parents, stamps)
        batch = TreeBatch(
            self._programs.fallbacks(len(requests), destinations.uniforms is not None),
            [*trees],
            destinations,
            torch.tensor([request.tokens[-1] for request in requests]),
        )
        for request, row in zip(requests, batch.rows()):
            request.fallback = row
        return batch

    def _destinations(
        self,
        requests: Sequence[DraftRequest],
        trees: Sequence[Tree | None],
        parents: NDArray[np.int64],
        stamps: Sequence[int],
    ) -> Destinations:
        """The destinations of the requests' trees. parents: int64 [requests, branches], the tokens
        that each branch continues. stamps: of the outcomes that the trees are for."""
        rows = [*zip(requests, trees)]
        temperatures = [request.temperature if tree else 0.0 for request, tree in rows]
        numbers = None
        if any(temperatures):
            # The bonus is one place before the first draft.
            seeds = [request.seed for request in requests]
            numbers = uniforms(seeds, parents + 1, self._policy.k)
        return Destinations(
            [request.where if tree else 0 for request, tree in rows],
            [request.seat if tree else -1 for request, tree in rows],
            stamps,
            temperatures,
            numbers,
        )

    def grow(self, batch: TreeBatch, kind: str) -> None:
        """Start one more step of a batch. kind: what to count it as."""
        with self._in_flight.timed(kind):
            batch.grow()
