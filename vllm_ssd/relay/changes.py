"""What has changed in a speculation table since the last look, as frames.

A look at a table in which nothing has changed is one gather of a few words a slot, and a
comparison. What changed is read as everybody reads it, stamp, body, stamp again; what was being
written then is looked at again the next time. What came and went between two looks is not told.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.relay.frames import (
    Confirmed,
    Fallback,
    Frame,
    Grown,
    Happened,
    Plan,
    Predicted,
    State,
    pack_probs,
)
from vllm_ssd.table import LOST, SpeculationTable

REST_S = 0.05  # between two looks without any request, when news come by messages only
_FINEST_S, _COARSEST_S = 100e-6, 1e-3
_LOOKS = 10  # in the time there and back


def pause_s(link_us: float) -> float:
    """Seconds between two looks at tables with requests, when a message there and back takes
    ``link_us`` microseconds, 0 = not known yet. More looks would bring news little earlier, and
    take time of a core, which on CPUs target or draft want."""
    return min(max(link_us * 1e-6 / _LOOKS, _FINEST_S), _COARSEST_S)


class Watch:
    """``offsets``: of 8-byte words in a slot, whose changes are found."""

    def __init__(self, table: SpeculationTable, offsets: Sequence[int]):
        slots = table.shape.slots
        self._words = table.slots.view(np.uint64).reshape(slots, -1)
        self._columns = np.array(offsets) // 8
        self._seen = np.zeros((slots, len(offsets)), np.uint64)
        self._now = np.empty_like(self._seen)

    def changed(self) -> list[int]:
        """Slots of which some word is not as it was at the last look."""
        # "clip" writes to ``out`` directly; all columns exist.
        self._words.take(self._columns, axis=1, out=self._now, mode="clip")
        differ = self._now != self._seen
        if not differ.any():
            return []
        self._seen, self._now = self._now, self._seen
        found: list[int] = np.flatnonzero(differ.any(axis=1)).tolist()
        return found

    def look_again(self, slot: int) -> None:
        """Count the slot among those that have changed, at the next look."""
        self._seen[slot] ^= np.uint64(2**64 - 1)


def _offset(dtype: np.dtype, *names: str) -> int:
    """Bytes from the beginning of a record to a field in it, the first one of an array."""
    offset = 0
    for name in names:
        assert dtype.fields is not None
        dtype, begin = dtype.fields[name][:2]
        offset += begin
        dtype = dtype.base
    return offset


def _offsets(table: SpeculationTable, record: str, *names: str) -> list[int]:
    """Of these fields in both records with this name."""
    slot = table.slots.dtype
    assert slot.fields is not None
    size = slot.fields[record][0].base.itemsize
    return [_offset(slot, record, name) + parity * size for parity in (0, 1) for name in names]


class TargetChanges:
    """What a target publishes, of the requests that were ``added``. Frames have this session."""

    def __init__(self, served: ServedTable, session: int):
        table = served.table
        self._served = served
        self._session = session
        self._plan = table.plan[0]
        self._watch = Watch(table, _offsets(table, "outcome", "stamp", "drafts_stamp"))
        self._stamps = table.slots["outcome"]["stamp"]
        # By slot: the request's generation, and the tokens of its text that were told.
        self._known: dict[int, tuple[int, int]] = {}
        self._told = [(0, 0)] * table.shape.slots  # stamps: of outcome and confirmation
        self._undrafted = 0

    def added(self, slot: int, generation: int, length: int) -> None:
        """The draft is told of a request with a text of ``length`` tokens."""
        self._known[slot] = generation, length
        self._watch.look_again(slot)  # an outcome may have come first

    def removed(self, slot: int, generation: int) -> None:
        """It is told that the request is gone."""
        if self.is_known(slot, generation):
            del self._known[slot]

    def is_known(self, slot: int, generation: int) -> bool:
        """Whether the draft is told what becomes of this request."""
        return slot in self._known and self._known[slot][0] == generation

    @property
    def has_requests(self) -> bool:
        """Whether there are requests that the draft is told of."""
        return bool(self._known)

    def take(self) -> list[Frame]:
        """What has changed since the last call."""
        frames: list[Frame] = []
        for slot in self._watch.changed():
            newest = int(self._stamps[slot].max())
            if self.is_known(slot, newest >> 32):
                frames += self._of_slot(slot, newest)
        undrafted = int(self._plan["undrafted"])
        if undrafted != self._undrafted:
            self._undrafted = undrafted
            frames.append(Plan(self._session, undrafted))
        return frames

    def _of_slot(self, slot: int, stamp: int) -> list[Frame]:
        frames: list[Frame] = []
        generation, length = self._known[slot]
        outcome_told, drafts_told = self._told[slot]
        outcomes = self._served.outcomes
        if stamp != outcome_told:
            outcome = outcomes.read(slot, stamp, length)
            if outcome is None:
                self._watch.look_again(slot)
                return frames
            if not outcome.new_tokens:  # too far behind: the target has to send the text again
                self.lose(slot, generation)
                return frames
            tokens = np.array(outcome.new_tokens, "<i4").tobytes()
            frames.append(
                Happened(self._session, slot, stamp, outcome.length, outcome.accepted, tokens)
            )
            self._known[slot] = generation, outcome.length
        if stamp != drafts_told:
            drafts = outcomes.read_drafts(slot, stamp)
            if drafts is not None:
                data = np.array(drafts, "<i4").tobytes()
                frames.append(Confirmed(self._session, slot, stamp, data))
                drafts_told = stamp
        self._told[slot] = stamp, drafts_told
        return frames

    def lose(self, slot: int, generation: int) -> None:
        """Have the target add this request again."""
        self._known.pop(slot, None)
        self._served.draft_states.set(slot, generation, LOST)


class DraftChanges:
    """What a draft publishes in a table. Frames have this session."""

    def __init__(self, table: SpeculationTable, session: int):
        self._session = session
        self._top_m = table.shape.top_m
        self._k, self._branches = table.shape.k, table.shape.branches
        slots = table.slots
        self._state = slots["state"]
        self._prediction, self._fallback = slots["prediction"], slots["fallback"]
        self._stamps, self._depths = self._prediction["stamp"], self._prediction["depth"]
        self._fallback_stamps = self._fallback["stamp"]
        self._fallback_depths = self._fallback["depth"]
        offsets = [_offset(slots.dtype, "state")]
        offsets += _offsets(table, "prediction", "stamp", "depth")
        offsets += _offsets(table, "fallback", "stamp", "depth")
        self._watch = Watch(table, offsets)
        # By slot, and by parity for the records: what was told.
        count = table.shape.slots
        self._states_told = [0] * count
        self._told = [[_Told(), _Told()] for _ in range(count)]
        self._fallback_told = [[_Told(), _Told()] for _ in range(count)]

    def take(self) -> list[Frame]:
        """What has changed since the last call."""
        frames: list[Frame] = []
        for slot in self._watch.changed():
            state = self._state.item(slot)
            if state != self._states_told[slot]:
                self._states_told[slot] = state
                frames.append(State(self._session, slot, state))
            for parity in (0, 1):
                found = [*self._of_fallback(slot, parity), *self._of_prediction(slot, parity)]
                if None in found:
                    self._watch.look_again(slot)
                frames += [frame for frame in found if frame is not None]
        return frames

    def _of_prediction(self, slot: int, parity: int) -> list[Frame | None]:
        """None in it: it is being written."""
        at = slot, parity
        stamp, depth = self._stamps.item(at), self._depths.item(at)
        told = self._told[slot][parity]
        if not stamp or told.is_all(stamp, depth):
            return []
        frames: list[Frame | None] = []
        record = self._prediction[at]
        if told.is_other(stamp, depth):
            count = min(max(int(record["count"]), 0), self._branches)
            accepted = record["accepted"][:count].tobytes()
            bonus = record["bonus"][:count].tobytes()
            steps = min(max(int(record["steps"]), 0), self._k)
            if self._stamps.item(at) != stamp:
                return [None]
            frames.append(Predicted(self._session, slot, stamp, steps, accepted, bonus))
            told.stamp, told.depth, told.count = stamp, 0, count
        known, depth = told.depth, min(depth, self._k)
        if depth > known:
            tokens = record["tokens"][: told.count, known:depth].T.tobytes()
            probs = b""
            if self._top_m:
                entries = record["draft_probs"][: told.count, known:depth]
                probs = pack_probs(entries.swapaxes(0, 1).reshape(-1, self._top_m))
            if self._stamps.item(at) != stamp:
                return [*frames, None]
            frames.append(Grown(self._session, slot, stamp, known, tokens, probs))
            told.depth = depth
        return frames

    def _of_fallback(self, slot: int, parity: int) -> list[Frame | None]:
        """Likewise."""
        at = slot, parity
        stamp, depth = self._fallback_stamps.item(at), self._fallback_depths.item(at)
        told = self._fallback_told[slot][parity]
        if not stamp or told.is_all(stamp, depth):
            return []
        known = 0 if told.is_other(stamp, depth) else told.depth
        depth = min(depth, self._k)
        record = self._fallback[at]
        tokens = record["tokens"][known:depth].tobytes()
        probs = pack_probs(record["draft_probs"][known:depth]) if self._top_m else b""
        if self._fallback_stamps.item(at) != stamp:
            return [None]
        told.stamp, told.depth = stamp, depth
        return [Fallback(self._session, slot, stamp, known, tokens, probs)]


class _Told:
    """What was told of a record. count: branches of it."""

    stamp = depth = count = 0

    def is_all(self, stamp: int, depth: int) -> bool:
        """Whether this is all that there is."""
        return stamp == self.stamp and depth == self.depth

    def is_other(self, stamp: int, depth: int) -> bool:
        """Whether there is another record now, or the same one begun anew."""
        return stamp != self.stamp or depth < self.depth
