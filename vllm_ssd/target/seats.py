"""Who sits in which slot of the table, and the control messages that tell the draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ssd.messages import Add, ControlClient, Remove
from vllm_ssd.table import NOWHERE, make_stamp


@dataclass(eq=False)
class Seat:
    """A request's place in the table. length: of its text at the last publication. round: of the
    next outcome. overdue: an outcome that was waited for in vain; until the draft has published
    for it or a later one, it is not waited for. temperature: of its sampling. source, depth: of
    the drafts that are being verified, and how many there are."""

    slot: int
    generation: int
    length: int
    round: int = 0
    overdue: np.uint64 | None = None
    last_used: int = 0
    temperature: float = 0.0
    source: int = NOWHERE
    depth: int = 0


class Roster:
    """``seats``: request id -> seat. Which slots are free is the caller's to know."""

    def __init__(self, control: ControlClient):
        self._control = control
        self._generation = 0
        self.seats: dict[str, Seat] = {}

    def seat(self, request_id: str, slot: int, tokens: Sequence[int], temperature: float) -> Seat:
        """Give a free slot to a request that has none; ``tokens`` is its text so far."""
        self._generation += 1
        seat = Seat(slot, self._generation, len(tokens), temperature=temperature)
        self.seats[request_id] = seat
        if not self._control.send(Add(slot, seat.generation, list(tokens), temperature)):
            seat.overdue = make_stamp(seat.generation, 0)
        return seat

    def leave(self, request_id: str) -> Seat | None:
        """Free a request's slot; None if it had none."""
        seat = self.seats.pop(request_id, None)
        if seat is not None:
            self._control.send(Remove(seat.slot, seat.generation))
        return seat
