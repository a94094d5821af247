"""Which request has which slot of the table, and the control messages that tell the draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from vllm_ssd.metrics.requests import request_key
from vllm_ssd.protocol import make_stamp
from vllm_ssd.protocol.heartbeat import draft_has_gone
from vllm_ssd.protocol.messages import Add, Remove
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.draft_sampling import CERTAIN, DraftSampling, seed_of


@dataclass(eq=False)
class SlotState:
    """What the target knows of the request in a slot. key: what stands for its id. length: tokens
    of its text at the last publication. round: of the next outcome. overdue: stamp of an outcome
    whose wait timed out; the draft is not waited for until it has published for this outcome or a
    later one. last_used: the step in which the request sampled last. sampling: of its drafts.
    drafts, draft_probs: all that were there for its last round; handed_over: the number of these
    that vLLM got."""

    slot: int
    generation: int
    key: int
    length: int
    round: int = 0
    overdue: np.uint64 | None = None
    last_used: int = 0
    sampling: DraftSampling = CERTAIN
    drafts: Sequence[int] = ()
    draft_probs: NDArray[np.int64] | None = None
    handed_over: int = 0

    def left_over(self, accepted: int, bonus: int) -> int:
        """Where in ``drafts`` those begin that are drafts for the next round already, since vLLM
        verified fewer than there were, accepted them all, and the bonus is the one after them; at
        the end of ``drafts`` if there are none. (One that was rejected is never the bonus.)"""
        if 0 <= accepted < len(self.drafts) and self.drafts[accepted] == bonus:
            return accepted + 1
        return len(self.drafts)


class SlotMap:
    """``states``: request id -> state. The caller keeps track of the free slots."""

    def __init__(self, connection: Connection):
        self._control = connection.control
        self._table = connection.table
        self._engine = connection.engine
        self._generation = 0
        self._draft = 0  # the process of the one that messages go to, 0 = not known yet
        # By slot: messages that the queue had no room for. A request that the draft is not told
        # the end of would keep its KV memory; of later ones in the slot it has not heard.
        self._unsent: dict[int, Remove] = {}
        self.states: dict[str, SlotState] = {}

    def assign(
        self, request_id: str, slot: int, tokens: Sequence[int], sampling: DraftSampling
    ) -> SlotState:
        """Give a free slot to a request that has none; ``tokens`` is its text so far. A draft that
        has gone is not sent texts, which would pile up: the next one asks for what it lacks."""
        self._generation += 1
        key = request_key(request_id)
        state = SlotState(slot, self._generation, key, len(tokens), sampling=sampling)
        self.states[request_id] = state
        add = Add(slot, state.generation, list(tokens))
        if sampling.temperature:
            seed = seed_of(sampling, self._engine, state.generation)
            add = replace(add, temperature=sampling.temperature, seed=seed)
        if draft_has_gone(self._table) or not self._send(add):
            state.overdue = make_stamp(state.generation, 0)
        return state

    def release(self, request_id: str) -> SlotState | None:
        """Free a request's slot; None if it had none."""
        state = self.states.pop(request_id, None)
        if state is not None:
            remove = Remove(state.slot, state.generation)
            if not self._send(remove):
                self._unsent.setdefault(state.slot, remove)
        return state

    def _send(self, message: Add | Remove) -> bool:
        """Send it after what was not sent before; False if the queue has no room for all. A draft
        that another one has replaced may hang, and would keep the connection for as long."""
        before, self._draft = self._draft, int(self._table.draft["pid"][0])
        if before not in (0, self._draft):
            self._control.reconnect()
        for slot, remove in list(self._unsent.items()):
            if not self._control.send(remove):
                return False
            del self._unsent[slot]
        return self._control.send(message)
