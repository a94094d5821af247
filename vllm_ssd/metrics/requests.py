"""The target's counters of each request, for spans in traces and for vLLM's speculative decoding
metrics of a request.

The key of a request's id identifies its record. Each slot has two records, which its successive
requests use in turn. A reader may learn of a request's end after another one has taken the slot;
the record of the ended request is still there.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from vllm_ssd.protocol import SpeculationTable

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
        """Count a verification. accepted: proposed tokens that the target accepted. drafts: how
        many proposed tokens, from the first one on, came from the draft; 0 counts nothing."""
        if drafts:
            record = self._record(slot, key)
            record["verified"] += drafts
            record["accepted"][min(accepted, drafts)] += 1

    def _record(self, slot: int, key: int) -> np.void:
        record: np.void = self._records[slot, self._turns[slot]]
        if record["key"] != key:
            self._turns[slot] ^= 1
            record = self._records[slot, self._turns[slot]]
            for name in record.dtype.names or ():
                record[name] = 0
            record["key"] = key
        return record


def read_records(
    table: SpeculationTable, key: int, places: Iterable[Any] | None = None
) -> dict[tuple[int, int], np.void]:
    """Return copies of the records of a request, by slot and turn. A preempted request may have one
    in each of its slots. Other requests may have its records by now. places: read only there."""
    if places is None:
        here = np.nonzero(table.requests["key"] == key)
        places = zip(*(axis.tolist() for axis in here))
    found = {place: table.requests[place].copy() for place in places}
    return {place: record for place, record in found.items() if record["key"] == key}


def read_request(table: SpeculationTable, key: int) -> dict[str, Any] | None:
    """Return a request's counters, the sum of its records, by their names in
    ``TableShape.request_dtype``; None if it has no record."""
    found = read_records(table, key).values()
    names = [name for name in table.requests.dtype.names or () if name != "key"]
    return {name: sum(each[name] for each in found).tolist() for name in names} if found else None
