"""The states of a draft, which the table of its service shows to every reader.

    LOADING   until the draft serves for the first time, as it wakes up or takes other weights
    SERVING   it drafts for the engines that have joined
    ASLEEP    its last engine sleeps; it has freed its memory until an engine wakes it
    LOST      its process has died or hangs; the keeper starts another one
    GONE      it has ended, or was lost too often: no draft will follow

The draft server writes the heartbeat and why it is away. Its keeper clears the heartbeat of a
server that has ended, and writes that no draft will follow.
"""

from __future__ import annotations

import time
from enum import Enum

from vllm_ssd.table.schema import ASLEEP, FOR_GOOD, RELOADING
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


class State(Enum):
    """The value is a sentence about the draft."""

    LOADING = "it loads"
    SERVING = "it serves"
    ASLEEP = "it sleeps"
    LOST = "its draft is gone"
    GONE = "it has ended"


def state_of(table: SpeculationTable, held: bool = True) -> State:
    """The state of this table's draft. held: whether a process still holds its files."""
    draft = table.draft[0]
    away = int(draft["away"])
    if not held or away == FOR_GOOD:
        return State.GONE
    if draft["heartbeat"]:
        return State.SERVING if draft_lives(table) else State.LOST
    if away == ASLEEP:
        return State.ASLEEP
    return State.LOADING if away == RELOADING or not draft["pid"] else State.LOST
