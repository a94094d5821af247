"""One end of a mirror: a copy of a speculation table on each node, kept equal by a bridge.

One side, on one of the two nodes, writes each record. ``take`` returns this side's changes.
``apply`` writes those of the other end.
"""

from __future__ import annotations

import time

import numpy as np

from vllm_ssd.bridge.changes import Changed, Malformed, Plan
from vllm_ssd.bridge.records import Outcome, Prediction, Record, Side, State
from vllm_ssd.table import SpeculationTable
from vllm_ssd.table.messages import Add, Remove

# A change names a kind by its index here. Changes are sent in this order.
KINDS: tuple[type[Record], ...] = (Outcome, State, Prediction)


class Mirror:
    """Mirror of an engine's ``table`` for one session. side: the side on this node. Sends and
    writes only records of requests that were added."""

    def __init__(self, table: SpeculationTable, side: Side):
        self.table, self._side = table, side
        kinds = [kind(table, number) for number, kind in enumerate(KINDS)]
        self._ours = [record for record in kinds if record.writer is side]
        self._theirs = {n: record for n, record in enumerate(kinds) if record.writer is not side}
        self._generations = np.zeros(table.shape.slots, np.uint64)  # of requests, 0 = none
        self._undrafted = table.plan["undrafted"]
        self._plan = 0  # the plan last sent

    def note(self, message: Add | Remove) -> None:
        """Record that a request is added or removed; both ends call this. Raises ``Malformed``."""
        slot, generation = message.slot, message.generation
        if slot >= self.table.shape.slots:
            raise Malformed(f"there is no slot {slot}")
        if isinstance(message, Remove):
            if self.is_known(slot, generation):
                self._generations[slot] = 0
            return
        self._generations[slot] = generation
        for record in self._ours:
            record.begin(slot, len(message.tokens))

    def is_known(self, slot: int, generation: int) -> bool:
        """Whether the request with this generation was added and still has the slot."""
        return self._generations.item(slot) == generation != 0

    @property
    def has_requests(self) -> bool:
        return bool(self._generations.any())

    def take(self) -> list[Changed | Plan]:
        """Changes of this side since the last call."""
        changes: list[Changed | Plan] = []
        for record in self._ours:
            changes += record.changes(self._generations)
        plan = self._undrafted.item(0)
        if self._side is Side.TARGET and plan != self._plan:
            self._plan = plan
            changes.append(Plan(bool(plan)))
        return changes

    def apply(self, change: Changed | Plan) -> None:
        """Write a change of the other side; raises ``Malformed``."""
        if isinstance(change, Plan):
            self._undrafted[0] = change.undrafted
            return
        record = self._theirs.get(change.record)
        if record is None or change.slot >= self.table.shape.slots:
            raise Malformed(f"there is no record {change.record} of slot {change.slot}")
        if self.is_known(change.slot, change.stamp >> 32):
            record.write(change)


def read_status(table: SpeculationTable, lives: bool) -> list[int]:
    """The draft's part of a table: all counters in the table's order, but in place of the heartbeat
    the nanoseconds since then, -1 = none. lives: False hides the heartbeat."""
    heartbeat, *others = (int(value) for value in table.draft[0].item())
    age_ns = max(time.monotonic_ns() - heartbeat, 0) if lives and heartbeat else -1
    return [age_ns, *others]


def show_status(table: SpeculationTable, counters: list[int], link_us: float, engine: bool) -> None:
    """Write what ``read_status`` has returned on the other node to a table, and the link's round
    trip in microseconds. engine: the table is an engine's, which itself counts restarts there.
    Raises ``Malformed``."""
    draft = table.draft[0]
    names = draft.dtype.names or ()
    if len(counters) != len(names):
        raise Malformed(f"{len(counters)} counters where there are {len(names)}")
    for name, value in zip(names, counters):
        if name not in ("heartbeat", "link_us") and not (engine and name == "restarts"):
            draft[name] = value
    draft["link_us"] = max(round(link_us), 1)
    age_ns = counters[0]
    draft["heartbeat"] = 0 if age_ns < 0 else max(time.monotonic_ns() - age_ns, 1)
