"""The draft's status and counters, from one table to the other."""

from __future__ import annotations

import time

from vllm_ssd.protocol import SpeculationTable
from vllm_ssd.relay.frames import Malformed, Status

# What is written at the target's end.
_OURS = ("heartbeat", "restarts", "link_us")


def read_status(table: SpeculationTable, session: int, lives: bool) -> Status:
    """The draft's part of a table. lives: False hides the heartbeat."""
    values = table.draft[0].item()
    heartbeat = int(values[0]) if lives else 0
    age_ns = max(time.monotonic_ns() - heartbeat, 0) if heartbeat else -1
    return Status(session, age_ns, [int(value) for value in values])


def show_status(table: SpeculationTable, status: Status, link_us: int, of_service: bool) -> None:
    """Write it, and how long the link takes. of_service: the table is the service's own, where the
    starts that its keeper counts are shown, too. Raises ``Malformed``."""
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
