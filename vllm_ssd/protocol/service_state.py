"""The states of a draft service, as its own table tells them to everybody who looks.

    LOADING   until the draft serves for the first time, and while it takes other weights
    SERVING   it drafts for the engines that have joined
    ASLEEP    its last engine sleeps, and it has given its memory back, until an engine wakes it
    LOST      its process has died or hangs; the keeper starts another one
    GONE      it has ended, or was lost too often: there will be no draft any more

The draft server writes the heartbeat and says why it is away; its keeper clears the heartbeat of a
server that has ended, and says that there will be no other one.
"""

from __future__ import annotations

from enum import Enum

from vllm_ssd.protocol.heartbeat import draft_lives
from vllm_ssd.protocol.schema import ASLEEP, FOR_GOOD, RELOADING
from vllm_ssd.protocol.speculation_table import SpeculationTable


class State(Enum):
    """The value is a sentence about the draft."""

    LOADING = "it loads"
    SERVING = "it serves"
    ASLEEP = "it sleeps"
    LOST = "its draft is gone"
    GONE = "it has ended"


def state_of(table: SpeculationTable, held: bool = True) -> State:
    """held: whether a process still holds the service's files."""
    draft = table.draft[0]
    away = int(draft["away"])
    if not held or away == FOR_GOOD:
        return State.GONE
    if draft["heartbeat"]:
        return State.SERVING if draft_lives(table) else State.LOST
    if away == ASLEEP:
        return State.ASLEEP
    return State.LOADING if away == RELOADING or not draft["pid"] else State.LOST
