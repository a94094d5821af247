"""Frames become records of a speculation table, written as target and draft write them themselves:
by their own ends of the records, body first and stamp last.

What does not fit the table is refused as ``Malformed``. What a table says is as little to be
trusted here as anywhere: whoever reads it checks tokens and distributions.
"""

from __future__ import annotations

import time

import numpy as np

from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.relay.frames import (
    Confirmed,
    Fallback,
    Grown,
    Happened,
    Malformed,
    Plan,
    Predicted,
    State,
    Status,
    int32s,
    unpack_probs,
)
from vllm_ssd.table import SpeculationTable, TableShape
from vllm_ssd.table.outcomes import OutcomeWriter


class AsTarget:
    """What a target has published, into the mirror of its table."""

    def __init__(self, table: SpeculationTable):
        self._shape = table.shape
        self._writer = OutcomeWriter(table)
        self._plan = table.plan[0]

    def apply(self, frame: Happened | Confirmed | Plan) -> None:
        """Write it; raises ``Malformed``."""
        match frame:
            case Happened():
                tokens = int32s(frame.tokens, self._shape.tail)
                if not len(tokens) or not len(tokens) <= frame.length:
                    raise Malformed(f"{len(tokens)} new tokens in a text of {frame.length}")
                if frame.accepted > self._shape.k:
                    raise Malformed(f"{frame.accepted} accepted drafts of {self._shape.k}")
                slot, stamp = _place(frame, self._shape)
                length, accepted = frame.length, frame.accepted
                self._writer.publish(slot, stamp, length, accepted, tokens.tolist())
            case Confirmed():
                drafts = int32s(frame.drafts, self._shape.k)
                self._writer.confirm(*_place(frame, self._shape), drafts.tolist())
            case Plan():
                self._plan["undrafted"] = frame.undrafted


class AsDraft:
    """What a draft has published in the mirror of a table, into this."""

    def __init__(self, served: ServedTable):
        self._shape = served.table.shape
        self._predictions = served.predictions
        self._state = served.table.slots["state"]
        self._stamps = served.table.slots["prediction"]["stamp"]
        self._depths = served.table.slots["prediction"]["depth"]
        self._counts = served.table.slots["prediction"]["count"]

    def apply(self, frame: State | Predicted | Grown | Fallback) -> None:
        """Write it; raises ``Malformed``."""
        match frame:
            case State():
                slot, state = _slot(frame.slot, self._shape), frame.state
                self._state[slot] = state
            case Predicted():
                self._predict(frame)
            case Grown():
                self._grow(frame)
            case Fallback():
                self._fall_back(frame)

    def _predict(self, frame: Predicted) -> None:
        accepted = int32s(frame.accepted, self._shape.branches)
        bonus = int32s(frame.bonus, self._shape.branches)
        if len(accepted) != len(bonus) or frame.steps > self._shape.k:
            raise Malformed("a prediction whose parts do not fit")
        slot, stamp = _place(frame, self._shape)
        self._predictions.publish(slot, stamp, accepted.tolist(), bonus.tolist(), frame.steps)

    def _grow(self, frame: Grown) -> None:
        slot, stamp = _place(frame, self._shape)
        at = slot, int(stamp) & 1
        count = self._counts.item(at)
        if self._stamps.item(at) != stamp or self._depths.item(at) != frame.known or not count:
            return  # withdrawn at this end
        tokens = int32s(frame.tokens, self._shape.k * count)
        new = len(tokens) // count
        if len(tokens) % count or frame.known + new > self._shape.k:
            raise Malformed(f"{len(tokens)} tokens for {count} branches")
        top_m = self._shape.top_m
        probs = unpack_probs(frame.probs, new * count, top_m) if top_m else None
        for step in range(new):
            row = slice(step * count, (step + 1) * count)
            entries = None if probs is None else probs[row]
            self._predictions.extend(slot, stamp, tokens[row].tolist(), entries)

    def _fall_back(self, frame: Fallback) -> None:
        slot, stamp = _place(frame, self._shape)
        tokens = int32s(frame.tokens, self._shape.k)
        if frame.known + len(tokens) > self._shape.k:
            raise Malformed(f"{len(tokens)} drafts after {frame.known}")
        known = len(self._predictions.fallback_tokens(slot, frame.stamp))
        if frame.known and known != frame.known:
            return  # withdrawn at this end
        top_m = self._shape.top_m
        probs = unpack_probs(frame.probs, len(tokens), top_m) if top_m else None
        self._predictions.publish_fallback(slot, stamp, tokens.tolist(), frame.known, probs)


# Of the draft's counters: what is written at this end of the relay.
_OURS = ("heartbeat", "restarts", "link_us")


def show_status(table: SpeculationTable, status: Status, link_us: int, of_service: bool) -> None:
    """Write the draft's status and counters, and how long the link takes. of_service: the table is
    the service's own, where the starts that its keeper counts are shown, too. Raises
    ``Malformed``."""
    draft = table.draft[0]
    names = draft.dtype.names or ()
    if len(status.counters) != len(names):
        raise Malformed(f"{len(status.counters)} counters where there are {len(names)}")
    for name, value in zip(names, status.counters):
        if name not in _OURS or (name == "restarts" and of_service):
            draft[name] = value
    draft["link_us"] = link_us
    age_ns = status.age_ns
    draft["heartbeat"] = 0 if age_ns < 0 else max(time.monotonic_ns() - age_ns, 1)


def read_status(table: SpeculationTable, session: int, lives: bool) -> Status:
    """The draft's part of a table. lives: False hides the heartbeat."""
    values = table.draft[0].item()
    heartbeat = int(values[0]) if lives else 0
    age_ns = max(time.monotonic_ns() - heartbeat, 0) if heartbeat else -1
    return Status(session, age_ns, [int(value) for value in values])


def _slot(slot: int, shape: TableShape) -> int:
    if slot >= shape.slots:
        raise Malformed(f"there is no slot {slot}")
    return slot


def _place(
    frame: Happened | Confirmed | Predicted | Grown | Fallback, shape: TableShape
) -> tuple[int, np.uint64]:
    return _slot(frame.slot, shape), np.uint64(frame.stamp)
