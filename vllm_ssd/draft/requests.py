"""All requests of a draft engine, their KV memory, and their states in the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.draft.kv_blocks import BlockPool
from vllm_ssd.draft.model import BLOCK_SIZE, DraftModel
from vllm_ssd.draft.request import DraftRequest, Phase
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import DRAFTING, GIVEN_UP, LOST, PREPARING, SpeculationTable
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.outcomes import OutcomeReader
from vllm_ssd.table.predictions import PredictionWriter


class DraftRequests:
    """Iterating gives the requests, in the order in which they came."""

    def __init__(self, model: DraftModel, table: SpeculationTable, policy: DraftPolicy):
        self._max_len = model.max_len
        self._policy = policy
        self.pool = BlockPool(model.num_blocks, BLOCK_SIZE)
        self._outcomes = OutcomeReader(table)
        self._predictions = PredictionWriter(table)
        self._states = DraftStates(table)
        self._by_slot: dict[int, DraftRequest] = {}
        self._unknown = self._find_unknown()

    def __len__(self) -> int:
        return len(self._by_slot)

    def __iter__(self) -> Iterator[DraftRequest]:
        return iter(self._by_slot.values())

    def get(self, slot: int) -> DraftRequest | None:
        """The request that has this slot."""
        return self._by_slot.get(slot)

    # They come and go

    def add(self, slot: int, generation: int, tokens: Sequence[int], temperature: float) -> None:
        """A request has a slot from now on; the one that had it before is dropped."""
        self.drop(slot)
        request = DraftRequest(slot, generation, list(tokens), self.pool.table(), temperature)
        if self._policy.top_m:
            request.rng = np.random.default_rng((self._policy.seed, generation))
        self._by_slot[slot] = request
        self._states.set(slot, generation, PREPARING)
        self.check_size(request)

    def remove(self, slot: int, generation: int) -> None:
        """Forget a request, unless another one has its slot already. The target's GPU may still
        have a step of it to run, which GIVEN_UP keeps from waiting."""
        request = self._by_slot.get(slot)
        if request is not None and request.generation == generation:
            self.drop(slot, GIVEN_UP)

    def drop(self, slot: int, state: int = PREPARING) -> None:
        """Forget a slot's request, if it has one, and publish ``state`` for it."""
        request = self._by_slot.pop(slot, None)
        if request is None:
            return
        request.forget_kv()
        self._predictions.clear(slot)
        self._states.set(slot, request.generation, state)

    def take_over(self) -> None:
        """Withdraw all that was published and have the target add all its requests again: a former
        server had drafted for them."""
        published = self._outcomes.newest_stamps() >> np.uint64(32)
        latest = np.maximum(published, self._states.generations())
        for slot in np.flatnonzero(latest):
            self._predictions.clear(slot)
            self._states.set(slot, int(latest[slot]), LOST)

    def ask_for_unknown(self) -> None:
        """Have the target add requests again that it publishes outcomes of and that were never
        added here: a server that died took the message with it, or the queue had no room. Acts on
        what two calls in a row, about a second apart, find unknown: no message takes that long."""
        before, self._unknown = self._unknown, self._find_unknown()
        for slot in np.flatnonzero((self._unknown == before) & (before != 0)):
            self._states.set(slot, int(before[slot]), LOST)

    def _find_unknown(self) -> NDArray[np.uint64]:
        """uint64 [slots]: the generation of each slot's newest outcome, 0 where there is none and
        where the draft has published a state of this generation or a later one."""
        generations = self._outcomes.newest_stamps() >> np.uint64(32)
        return np.where(generations > self._states.generations(), generations, np.uint64(0))

    # KV memory

    def check_size(self, request: DraftRequest) -> None:
        """Give up a request whose text exceeds the draft's positions or its whole KV memory."""
        text = len(request.tokens)
        too_long = text + 2 * self._policy.k + 1 > self._max_len
        if too_long or self.pool.blocks_for(text + self._policy.scratch) > self.pool.num_blocks:
            self.drop(request.slot, GIVEN_UP)

    def admitted(self) -> list[DraftRequest]:
        """The requests that have KV memory, after giving it to those whose text and branches now
        fit the free blocks."""
        for request in self._by_slot.values():
            if not request.admitted:
                size = len(request.tokens) + self._policy.scratch
                if self.pool.blocks_for(size) <= self.pool.num_free:
                    request.adopt_kv()
                    request.admitted = request.table.reserve(size)
        return [request for request in self._by_slot.values() if request.admitted]

    def reserve(
        self, requests: Sequence[DraftRequest], entries: Callable[[DraftRequest], int]
    ) -> list[DraftRequest]:
        """Reserve ``entries`` KV entries beyond what each request was fed; returns those that got
        them. The others lose their KV, wait for memory and are fed their text again."""
        fitting = []
        for request in requests:
            if request.table.reserve(len(request.fed) + entries(request)):
                fitting.append(request)
            else:
                request.forget_kv()
                request.admitted = False
                self._states.set(request.slot, request.generation, PREPARING)
        return fitting

    def await_outcome(self, request: DraftRequest) -> None:
        """The model has seen all of the request's text and drafts."""
        request.phase = Phase.IDLE
        self._states.set(request.slot, request.generation, DRAFTING)
