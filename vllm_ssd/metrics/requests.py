"""The target's counters of each request, for spans in traces and for vLLM's speculative decoding
metrics of a request.

The key of a request's id identifies its record. Each slot has two records, which its successive
requests use in turn. A reader may learn of a request's end after another one has taken the slot;
the record of the ended request is still there.
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
    """Return the key of the id that an engine gave to a request: 1..2^63-1."""
    digest = blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 or 1


class RequestCounters:
    """Writes the records of requests, on the host."""

    def __init__(self, table: SpeculationTable):
        self._records = table.requests
        self._turns = [0] * table.shape.slots  # which record of each slot is its request's

    def count(self, slot: int, key: int, result: Result, wait_s: float) -> None:
        """Count a round of the request that has ``slot`` and ``key``. result: what the first lookup
        found. wait_s: seconds that the round waited for draft tokens."""
        record = self._record(slot, key)
        record[result] += 1
        record["wait_us"] += int(wait_s * 1e6)

    def verified(self, slot: int, key: int, accepted: int, drafts: int) -> None:
        """Record a verification. accepted: proposed tokens that the target accepted. drafts: how
        many proposed tokens, from the first one on, came from the draft; 0 records nothing."""
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
    """Counters of one request: rounds by what the first lookup found, and the seconds that it
    waited for draft tokens."""

    hits: int
    misses: int
    late: int
    wait_s: float

    @property
    def rounds(self) -> int:
        return self.hits + self.misses + self.late

    @classmethod
    def read(cls, table: SpeculationTable, key: int) -> RequestCounts | None:
        """Return a request's counts; None if there are none, or another request has its record by
        now. Adds up the records of a preempted request, which may have one in each of its slots."""
        keys = table.requests["key"]
        places = np.nonzero(keys == key)
        found = table.requests[places]  # a copy
        found = found[keys[places] == key]  # drop records that changed hands
        if not len(found):
            return None
        hits, misses, late, wait_us = (
            int(found[name].sum()) for name in ("hits", "misses", "late", "wait_us")
        )
        return cls(hits, misses, late, wait_us / 1e6)


class Verifications:
    """Reads the verifications of one request."""

    def __init__(self, table: SpeculationTable, key: int):
        self._keys = table.requests["key"]
        self._rings = table.requests["verified"]
        self._key = key
        self._place = (0, 0)  # of the request's record
        self._seen: dict[tuple[int, int], int] = {}  # record's place -> last number read

    def news(self) -> list[tuple[int, int]]:
        """Return the verifications since the last call, each as two numbers of draft tokens:
        verified and accepted. On a GPU they may come a step later than their tokens."""
        if news := self._read(self._place):
            return news
        # Its record may be elsewhere: the first one, or in a new slot after preemption.
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
