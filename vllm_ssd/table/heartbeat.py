"""Tells whether the draft lives: the draft server writes the time into the table while it works."""

from __future__ import annotations

import time

from vllm_ssd.table.speculation_table import SpeculationTable

# Nanoseconds. Targets stop waiting for a draft whose last heartbeat is older. No single forward
# takes that long.
HEARTBEAT_LIMIT_NS = 5_000_000_000


def draft_lives(table: SpeculationTable) -> bool:
    """True if the draft's last heartbeat is less than ``HEARTBEAT_LIMIT_NS`` ago."""
    return time.monotonic_ns() - int(table.draft["heartbeat"][0]) < HEARTBEAT_LIMIT_NS


def draft_has_gone(table: SpeculationTable) -> bool:
    """True if there was a draft, and its last heartbeat is too long ago."""
    return bool(table.draft["pid"][0]) and not draft_lives(table)


def heartbeat_age_s(table: SpeculationTable) -> float | None:
    """Seconds since the draft's last heartbeat. None if no heartbeat is expected: before the first
    one, while the draft sleeps or loads, and after it was found to be gone."""
    heartbeat = int(table.draft["heartbeat"][0])
    return max(time.monotonic_ns() - heartbeat, 0) / 1e9 if heartbeat else None
