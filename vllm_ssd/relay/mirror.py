"""One end of a mirror: a copy of a speculation table on each node, kept equal by two relay ends.

One side, on one of the two nodes, writes each record. ``take`` returns this side's changes as
frames for the other end. ``apply`` writes changes from the other end. ``take`` gathers and compares
a few words a slot. It skips values that were overwritten between two calls.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.protocol import LOST, SpeculationTable
from vllm_ssd.protocol.draft_states import DraftStates
from vllm_ssd.protocol.messages import Add, Remove
from vllm_ssd.relay.frames import Changed, Malformed, Plan, Status
from vllm_ssd.relay.records import (
    Fallback,
    Outcome,
    Prediction,
    Record,
    Side,
    State,
    TooFarBehind,
)

# A frame names a kind by its index here. The changes of a slot are sent in this order.
KINDS: tuple[type[Record], ...] = (Outcome, State, Fallback, Prediction)
LONGEST_TEXT = 3 * 2**20  # tokens, which fit a message
_INT32 = 2**31
_OURS = ("heartbeat", "restarts", "link_us")  # counters that the target's end writes itself


class Mirror:
    """Mirror of an engine's ``table`` for one ``session``. side: the side on this node. Sends and
    writes only records of requests that were added."""

    def __init__(self, table: SpeculationTable, session: int, side: Side):
        self.session = session
        self.table, self._side = table, side
        kinds = [kind(table) for kind in KINDS]
        self._ours = {n: record for n, record in enumerate(kinds) if record.writer is side}
        self._theirs = {n: record for n, record in enumerate(kinds) if record.writer is not side}
        self._states = DraftStates(table)
        self._undrafted = table.plan["undrafted"]
        self._plan = 0  # the plan last sent
        self._requests: dict[int, int] = {}  # generations, by slot
        # All 8-byte words of the slots, the watched columns, and their values at the last call.
        self._words = table.slots.view(np.uint64).reshape(table.shape.slots, -1)
        self._columns = _columns(table.slots, self._ours.values())
        self._seen = np.zeros((table.shape.slots, len(self._columns)), np.uint64)
        self._now = np.empty_like(self._seen)

    def note(self, message: Add | Remove) -> None:
        """Record that a request is added or removed; both ends call this. Raises ``Malformed``."""
        slot, generation = message.slot, message.generation
        if slot >= self.table.shape.slots:
            raise Malformed(f"there is no slot {slot}")
        if isinstance(message, Remove):
            if self.is_known(slot, generation):
                del self._requests[slot]
            return
        tokens = message.tokens
        ends = (min(tokens), max(tokens)) if tokens else ()
        if len(tokens) > LONGEST_TEXT or not all(-_INT32 <= end < _INT32 for end in ends):
            raise Malformed("a text of too many tokens, or of none that there are")
        self._requests[slot] = generation
        for record in self._ours.values():
            record.begin(slot, len(tokens))
        self._look_again(slot)  # an outcome may have been written before this message

    def is_known(self, slot: int, generation: int) -> bool:
        """Whether the request with this generation was added and still has the slot."""
        return self._requests.get(slot) == generation

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def take(self) -> list[Changed | Plan]:
        """Changes of this side since the last call, as frames."""
        frames: list[Changed | Plan] = []
        for slot in self._changed():
            if slot in self._requests:
                frames += self._news(slot, self._requests[slot])
        plan = self._undrafted.item(0)
        if self._side is Side.TARGET and plan != self._plan:
            self._plan = plan
            frames.append(Plan(self.session, bool(plan)))
        return frames

    def apply(self, frame: Changed | Plan) -> None:
        """Write a change of the other side; raises ``Malformed``."""
        if isinstance(frame, Plan):
            self._undrafted[0] = frame.undrafted
            return
        record = self._theirs.get(frame.record)
        if record is None or frame.slot >= self.table.shape.slots:
            raise Malformed(f"there is no record {frame.record} of slot {frame.slot}")
        if self.is_known(frame.slot, frame.stamp >> 32):
            record.write(frame)

    def _changed(self) -> list[int]:
        """Slots in which a watched word has changed since the last call."""
        # mode="clip" makes numpy write to ``out`` directly. No column is out of range.
        self._words.take(self._columns, axis=1, out=self._now, mode="clip")
        differ = self._now != self._seen
        if not differ.any():
            return []
        self._seen, self._now = self._now, self._seen
        found: list[int] = np.flatnonzero(differ.any(axis=1)).tolist()
        return found

    def _look_again(self, slot: int) -> None:
        """Make the next call of ``_changed`` report the slot."""
        self._seen[slot] ^= np.uint64(2**64 - 1)

    def _news(self, slot: int, generation: int) -> list[Changed]:
        frames = []
        try:
            for number, record in self._ours.items():
                for news in record.news(slot, generation):
                    if news is None:
                        self._look_again(slot)
                    else:
                        frames.append(Changed(self.session, number, slot, *news))
        except TooFarBehind:  # the target has to add this request again
            del self._requests[slot]
            self._states.set(slot, generation, LOST)
        return frames


def _columns(slots: NDArray, records: Iterable[Record]) -> list[int]:
    """Columns of a slot's watched 8-byte words; of both records if a slot has two of a kind."""
    found = []
    for array in itertools.chain.from_iterable(record.watched for record in records):
        begin = array.ctypes.data - slots.ctypes.data
        copies = [0] if array.ndim == 1 else [0, array.strides[1]]
        found += [(begin + offset) // 8 for offset in copies]
    return found


def read_status(table: SpeculationTable, session: int, lives: bool) -> Status:
    """The draft's part of a table, as a frame. lives: False hides the heartbeat."""
    values = table.draft[0].item()
    heartbeat = int(values[0]) if lives else 0
    age_ns = max(time.monotonic_ns() - heartbeat, 0) if heartbeat else -1
    return Status(session, age_ns, [int(value) for value in values])


def show_status(table: SpeculationTable, status: Status, link_us: float) -> None:
    """Write the status of the draft to the table, and the link's round trip in microseconds. The
    service's own table, in session 0, also gets its keeper's count of restarts. Raises
    ``Malformed``."""
    draft = table.draft[0]
    names = draft.dtype.names or ()
    if len(status.counters) != len(names):
        raise Malformed(f"{len(status.counters)} counters where there are {len(names)}")
    for name, value in zip(names, status.counters):
        if name not in _OURS or (name == "restarts" and not status.session):
            draft[name] = value
    draft["link_us"] = max(round(link_us), 1)
    age_ns = status.age_ns
    draft["heartbeat"] = 0 if age_ns < 0 else max(time.monotonic_ns() - age_ns, 1)
