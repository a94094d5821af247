"""Assigns slots of the table to requests, and tells the draft by control messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from vllm_ssd.table import LAST_GENERATION, make_stamp
from vllm_ssd.table.messages import Add, Remove
from vllm_ssd.table.service_state import draft_has_gone
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.draft_sampling import CERTAIN, DraftSampling, seed_of


@dataclass(eq=False)
class SlotState:
    """The target's knowledge of the request in a slot. length: tokens of its text at the last
    publication. round: of the next outcome. overdue: stamp of an outcome whose wait timed out; the
    target waits again once the draft has published for it or for a later one. last_used: the step
    in which the request sampled last. sampling: of its draft tokens. drafts, draft_probs: all draft
    tokens of its last round, and int64 [.., top_m], their distributions. handed_over: how many of
    these tokens vLLM verifies."""

    slot: int
    generation: int
    length: int
    round: int = 0
    overdue: np.uint64 | None = None
    last_used: int = 0
    sampling: DraftSampling = CERTAIN
    drafts: Sequence[int] = ()
    draft_probs: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    handed_over: int = 0

    def keep_left_over(self, accepted: int, bonus: int) -> None:
        """Keep of ``drafts`` those for the next round. vLLM may verify fewer than there are and
        accept all of them. If the bonus token is then the next of ``drafts``, those after it serve
        the next round. (A rejected token is never the bonus.)"""
        first = len(self.drafts)
        if 0 <= accepted < len(self.drafts) and self.drafts[accepted] == bonus:
            first = accepted + 1
        self.drafts, self.draft_probs = self.drafts[first:], self.draft_probs[first:]


class SlotMap:
    """Maps requests to slots. ``states``: request id -> state. The caller tracks the free slots."""

    def __init__(self, connection: Connection):
        self._control = connection.control
        self._table = connection.table
        self._engine = connection.engine
        self._always_certain = connection.always_certain
        self._generation = 0
        self._draft = 0  # process id of the draft that gets the messages, 0 = not known yet
        # Slot -> message that the queue had no room for. Without it, the draft would keep the
        # request's KV blocks. The draft has not heard of later requests in the slot.
        self._unsent: dict[int, Remove] = {}
        self.states: dict[str, SlotState] = {}

    def assign(
        self, request_id: str, slot: int, tokens: Sequence[int], sampling: DraftSampling
    ) -> SlotState:
        """Give a free slot to a request that has none. tokens: its text so far. A draft that has
        gone is sent no texts, because they would pile up; its successor asks for them."""
        self._generation = self._generation % LAST_GENERATION + 1  # after the last: no drafts
        sampling = CERTAIN if self._always_certain else sampling
        state = SlotState(slot, self._generation, len(tokens), sampling=sampling)
        self.states[request_id] = state
        add = Add(slot, state.generation, list(tokens))
        if sampling.temperature:
            seed = seed_of(sampling, self._engine, state.generation)
            add = replace(add, temperature=sampling.temperature, seed=seed)
        if draft_has_gone(self._table) or not self._send(add):
            state.overdue = make_stamp(state.generation, 0)
        return state

    def release(self, request_id: str) -> SlotState | None:
        """Free a request's slot and return its state; None if it had no slot."""
        state = self.states.pop(request_id, None)
        if state is not None:
            remove = Remove(state.slot, state.generation)
            if not self._send(remove):
                self._unsent.setdefault(state.slot, remove)
        return state

    def _send(self, message: Add | Remove) -> bool:
        """Send ``message`` after the unsent ones; return False if the queue has no room for all.
        Reconnects to a new draft, because the replaced one may hang and hold the connection."""
        before, self._draft = self._draft, int(self._table.draft["pid"][0])
        if before not in (0, self._draft):
            self._control.reconnect()
        for slot, remove in list(self._unsent.items()):
            if not self._control.send(remove):
                return False
            del self._unsent[slot]
        return self._control.send(message)
