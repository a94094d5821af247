"""What the target counts of each request, for its span in a trace.

A request is known by the key of its id. It has one of the two records of its slot, the one that the
slot's request before did not have, since who asks hears of a request's end when its slot may have
been given on.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np

from vllm_ssd.table import SpeculationTable

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
        record = self._records[slot, self._turns[slot]]
        if record["key"] != key:
            self._turns[slot] ^= 1
            record = self._records[slot, self._turns[slot]]
            for name in record.dtype.names:
                record[name] = 0
            record["key"] = key
        record[result] += 1
        record["wait_us"] += int(wait_s * 1e6)


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
