"""The draft's side of one target's speculation table: its ends of the records, and its counters.

A draft serves one table or several, which come and go (``DraftEngine.join``). A served table and a
slot in it identify a request.

A draft that hung may find that another draft has the table by now. The table holds its owner's
process. A draft that is no longer the owner leaves the counters alone, and ignores requests that it
is sent. Predictions and states need no owner: their writers refuse to replace later stamps. So a
program that was stopped in the middle of its work does no harm when it goes on writing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.table import LOST, SpeculationTable
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.outcomes import OutcomeReader
from vllm_ssd.table.predictions import PredictionWriter


class ServedTable:
    """places: by slot, where the draft's programs publish, from ``Publisher.join``; empty if no
    program does. live: its requests. counters: of ``draft_dtype``. Those of requests are this
    table's own. Those of KV blocks and work are the whole draft's, and all tables that it serves
    have them. idle: the target does without drafts for now. The draft then does not show the model
    its texts, which would take time of a GPU that both may share; later it shows them all
    together."""

    def __init__(self, table: SpeculationTable, places: Sequence[int] = ()):
        self.table = table
        self.outcomes = OutcomeReader(table)
        self.predictions = PredictionWriter(table)
        self.draft_states = DraftStates(table)
        self.places = places
        self.live = 0
        self.counters = table.draft[0]
        self._owner = 0  # this process, once it has claimed the table
        self._plan = table.plan[0]
        self.idle = False
        self._unknown = self._find_unknown()

    def claim(self) -> None:
        """Make this process the owner of the table, which another draft may have had."""
        self._owner = self.counters["pid"] = os.getpid()
        self.beat()
        self.take_over()

    @property
    def is_ours(self) -> bool:
        """True if no other draft has claimed the table since this one did."""
        return not self._owner or int(self.counters["pid"]) == self._owner

    def tell(self, counter: str, value: int) -> None:
        """Set one of the draft's counters, unless the table is another draft's."""
        if self.is_ours:
            self.counters[counter] = value

    def count(self, **amounts: int) -> None:
        """Add to some of the draft's counters, unless the table is another draft's."""
        if self.is_ours:
            for counter, amount in amounts.items():
                self.counters[counter] += amount

    def look(self, free_blocks: int) -> None:
        """Read whether the target does without drafts, and tell it the free KV blocks. Called once
        a step."""
        self.idle = bool(self._plan["undrafted"])
        self.tell("free_blocks", free_blocks)

    def beat(self) -> None:
        """Show the target that the draft lives."""
        self.tell("heartbeat", time.monotonic_ns())

    def take_over(self) -> None:
        """Withdraw all that was published, and have the target add all its requests again: the
        draft of a former server had them."""
        published = self.outcomes.newest_stamps() >> np.uint64(32)
        latest = np.maximum(published, self.draft_states.generations())
        for slot in np.flatnonzero(latest):
            self.predictions.clear(slot, int(latest[slot]))
            self.draft_states.set(slot, int(latest[slot]), LOST)

    def ask_for_unknown(self) -> None:
        """Have the target add requests again if it publishes their outcomes but they were never
        added here. A server that died took the message with it, or the queue had no room. A request
        must be unknown in two calls in a row, about a second apart: no message takes that long."""
        before, self._unknown = self._unknown, self._find_unknown()
        for slot in np.flatnonzero((self._unknown == before) & (before != 0)):
            self.draft_states.set(slot, int(before[slot]), LOST)

    def _find_unknown(self) -> NDArray[np.uint64]:
        """uint64 [slots]: the generation of each slot's newest outcome. 0 if there is none, or if
        the draft has published a state of this generation or a later one."""
        generations = self.outcomes.newest_stamps() >> np.uint64(32)
        return np.where(generations > self.draft_states.generations(), generations, np.uint64(0))
