"""The states of a draft, which the table of its service shows to every reader.

    LOADING   until the draft serves for the first time, and while it takes other weights
    SERVING   it drafts for the engines that have joined
    ASLEEP    its last engine sleeps; it has freed its memory until an engine wakes it
    LOST      its process has died or hangs; the keeper starts another one
    GONE      it has ended, or was lost too often: no draft will follow

The draft server writes the heartbeat and why it is away. Its keeper clears the heartbeat of a
server that has ended, and writes that no draft will follow.
"""

from __future__ import annotations

from enum import Enum

from vllm_ssd.table.heartbeat import draft_lives
from vllm_ssd.table.schema import ASLEEP, FOR_GOOD, RELOADING
from vllm_ssd.table.speculation_table import SpeculationTable


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
