"""What the draft's end has of an engine on another node: a run directory and a table, like that of
an engine on this one, so that the draft server sees no difference."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from vllm_ssd.relay.apply import AsTarget, read_status
from vllm_ssd.relay.asks import Asks
from vllm_ssd.relay.changes import DraftChanges
from vllm_ssd.relay.frames import (
    Added,
    Confirmed,
    Frame,
    Happened,
    Malformed,
    Open,
    Plan,
    Removed,
    Status,
    int32s,
)
from vllm_ssd.service import rundir
from vllm_ssd.service.joined_draft import PUT_AWAY_S
from vllm_ssd.service.messages import Add, ControlClient, Join, Leave, Remove, endpoint
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.table import SpeculationTable, TableOwner, TableShape

LONGEST_TEXT = 2**22 - 2**10  # tokens, which fit a message
ANSWER_S = 2.5  # for the draft server to take it, or to leave it


class MirroredEngine:
    """From ``join`` to ``close``. session: of its frames; engine: its name."""

    def __init__(self, opened: Open, service: Path, asks: Asks):
        """``service``: run directory of the draft service. Raises as ``OwnFiles``."""
        self.session, self.engine = opened.session, opened.engine
        self._service, self._asks = service, asks
        shape = TableShape(opened.slots, opened.k, opened.branches, opened.tail, opened.top_m)
        self._files = OwnFiles(shape, TableOwner(opened.model, opened.index, os.getpid()))
        self._run_dir = self._files.run_dir
        self._table = SpeculationTable.open(rundir.table_path(self._run_dir))
        self._table.target["started_s"] = int(time.time())  # as a target's worker does
        self._control = ControlClient(endpoint(self._run_dir))
        self._changes = DraftChanges(self._table, self.session)
        self._as_target = AsTarget(self._table)
        self._requests: dict[int, int] = {}  # generations, by slot

    def join(self, then: Callable[[str], None]) -> None:
        """Have the draft draft for it; ``then`` gets "" or why it does not, as a sentence."""
        no_answer = "the draft server gave no answer"
        self._asks.ask(
            self._service,
            Join(str(self._run_dir)),
            ANSWER_S,
            lambda answer: then(no_answer if answer is None else answer),
        )

    def apply(self, frame: Added | Removed | Happened | Confirmed | Plan) -> None:
        """What the target's end tells; raises ``Malformed``."""
        match frame:
            case Added():
                self._check_slot(frame.slot)
                tokens = int32s(frame.tokens, LONGEST_TEXT).tolist()
                self._requests[frame.slot] = frame.generation
                # What a full queue loses the draft asks for by itself.
                self._control.send(
                    Add(frame.slot, frame.generation, tokens, frame.temperature, frame.seed)
                )
            case Removed():
                self._check_slot(frame.slot)
                if self._requests.get(frame.slot) == frame.generation:
                    del self._requests[frame.slot]
                self._control.send(Remove(frame.slot, frame.generation))
            case _:
                self._as_target.apply(frame)

    @property
    def has_requests(self) -> bool:
        """Whether the draft may be drafting for it."""
        return bool(self._requests)

    def changes(self) -> list[Frame]:
        """What the draft has published since the last call."""
        return self._changes.take()

    def status(self, lives: bool) -> Status:
        """lives: whether the service does."""
        return read_status(self._table, self.session, lives)

    def close(self, asleep: bool = False) -> None:
        """Have the draft leave it, and remove it. asleep: as in ``Leave``."""
        self._control.close()
        leave = Leave(str(self._run_dir), asleep)
        limit_s = PUT_AWAY_S if asleep else ANSWER_S
        self._asks.ask(self._service, leave, limit_s, lambda _: self._files.remove())

    def remove(self) -> None:
        """Remove it at once: the draft server notices within a second or two."""
        self._control.close()
        self._files.remove()

    def _check_slot(self, slot: int) -> None:
        if slot >= self._table.shape.slots:
            raise Malformed(f"there is no slot {slot}")
