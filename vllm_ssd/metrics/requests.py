"""What the target counts of each request: for its span in a trace, and for what vLLM says of its
speculative decoding.

A request is known by the key of its id. It has one of the two records of its slot, the one that the
slot's request before did not have, since who asks hears of a request's end when its slot may have
been given on.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np

from vllm_ssd.protocol import SpeculationTable
from vllm_ssd.protocol.schema import VERIFICATIONS

Result = Literal["hits", "misses", "late"]


def request_key(request_id: str) -> int:
    """What stands for the id that an engine gave to a request: 1..2^63-1."""
    digest = blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 or 1


class RequestCounters:
    """The writer's end, on the host."""

    def __init__(self, table: SpeculationTable):
        self._records = table.requests
        self._turns = [0] * table.shape.slots  # which record of each slot is its request's

    def count(self, slot: int, key: int, result: Result, wait_s: float) -> None:
        """A round of the request with this key, which has this slot. result: what the first look
        found; wait_s: seconds that it waited for drafts."""
        record = self._record(slot, key)
        record[result] += 1
        record["wait_us"] += int(wait_s * 1e6)

    def verified(self, slot: int, key: int, accepted: int, drafts: int) -> None:
        """Of this request the target has accepted ``accepted`` proposed tokens, of which the first
        ``drafts`` were the draft's."""
        if drafts:
            ring = self._record(slot, key)["verified"]
            number = (int(ring.max()) >> 32) + 1
            ring[number % VERIFICATIONS] = number << 32 | drafts << 16 | min(accepted, drafts)

    def _record(self, slot: int, key: int) -> np.void:
        record: np.void = self._records[slot, self._turns[slot]]
        if record["key"] != key:
            self._turns[slot] ^= 1
            record = self._records[slot, self._turns[slot]]
            for name in record.dtype.names or ():
                record[name] = 0
            record["key"] = key
        return record


@dataclass(frozen=True)
class RequestCounts:
    """What was counted of a request: rounds, by what the first look for drafts found, and the
    seconds that it waited for drafts."""

    hits: int
    misses: int
    late: int
    wait_s: float

    @property
    def rounds(self) -> int:
        return self.hits + self.misses + self.late

    @classmethod
    def read(cls, table: SpeculationTable, key: int) -> RequestCounts | None:
        """None if nothing was counted of it, or its record is another's by now. One that was
        preempted may have several: in each slot that it had."""
        keys = table.requests["key"]
        places = np.nonzero(keys == key)
        found = table.requests[places]  # a copy
        found = found[keys[places] == key]  # of none that was given on meanwhile
        if not len(found):
            return None
        hits, misses, late, wait_us = (
            int(found[name].sum()) for name in ("hits", "misses", "late", "wait_us")
        )
        return cls(hits, misses, late, wait_us / 1e6)


class Verifications:
    """The reader's end of what was verified of one request."""

    def __init__(self, table: SpeculationTable, key: int):
        self._keys = table.requests["key"]
        self._rings = table.requests["verified"]
        self._key = key
        self._place = (0, 0)  # of its record
        self._seen: dict[tuple[int, int], int] = {}  # the last one's number, by the record's place

    def news(self) -> list[tuple[int, int]]:
        """Those since the last call, each as the number of the draft's tokens that were verified
        and of those accepted. A GPU's may come a step later than its tokens."""
        if news := self._read(self._place):
            return news
        # None yet; or it was preempted, and has another slot.
        for place in zip(*(axis.tolist() for axis in np.nonzero(self._keys == self._key))):
            if news := self._read(place):
                self._place = place
                return news
        return []

    def _read(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        if self._keys[place] != self._key:
            return []
        news, ring = [], self._rings[place].tolist()
        seen = self._seen.get(place, 0)
        while (entry := ring[(seen + 1) % VERIFICATIONS]) >> 32 > seen:
            seen = entry >> 32
            news.append((entry >> 16 & 0xFFFF, entry & 0xFFFF))
        self._seen[place] = seen
        return news
