"""What the target's end has of an engine on its node: the ends of its table and of its control
socket that a draft server has elsewhere."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.relay.apply import AsDraft, show_status
from vllm_ssd.relay.changes import TargetChanges
from vllm_ssd.relay.frames import (
    Added,
    Fallback,
    Frame,
    Grown,
    Open,
    Predicted,
    Removed,
    State,
    Status,
)
from vllm_ssd.relay.sockets import Answer, Sockets
from vllm_ssd.service import rundir
from vllm_ssd.service.messages import NOT_ITS_OWN, Add, Remove, Request
from vllm_ssd.table import SpeculationTable


class RelayedEngine:
    """``begin`` once the draft drafts for it, until ``close``."""

    def __init__(self, run_dir: Path, session: int):
        """Raises ``OSError`` and ``ValueError`` if there is no such engine."""
        if not rundir.is_run_dir(run_dir):
            raise ValueError(f"{run_dir} is not the run directory of an engine of this user")
        self.run_dir = run_dir
        self.session = session
        self._table = SpeculationTable.open(rundir.table_path(run_dir))
        self._served = ServedTable(self._table)
        self._changes = TargetChanges(self._served, session)
        self._as_draft = AsDraft(self._served)
        self._told: list[Frame] = []
        self._begun = ExitStack()
        self._serves = False
        self._watched = rundir.watch(run_dir)
        self._begun.callback(os.close, self._watched)
        if not self.lives():
            self._begun.close()
            raise ValueError(f"the engine in {run_dir} is gone")

    def opening(self) -> Open:
        """How the draft's end is told of it."""
        shape, owner = self._table.shape, self._table.owner
        sizes = shape.slots, shape.k, shape.branches, shape.tail, shape.top_m
        return Open(self.session, self.run_dir.name, *sizes, owner.model, owner.engine)

    def begin(self, sockets: Sockets) -> None:
        """Take its control messages, and have it send all its requests; ``OSError`` if that
        fails."""
        socket = sockets.serve(self.run_dir, self._handle)
        self._begun.callback(sockets.remove, socket)
        self._serves = True
        self._served.take_over()

    def lives(self) -> bool:
        """Whether the engine is still there."""
        return rundir.is_held(self._watched)

    def look_after(self) -> None:
        """Once a second: requests that the draft was not told of."""
        if self._serves:
            self._served.ask_for_unknown()

    def changes(self) -> list[Frame]:
        """What the target has published or told since the last call."""
        told, self._told = self._told, []
        return told + self._changes.take() if self._serves else told

    @property
    def has_requests(self) -> bool:
        return self._changes.has_requests

    def apply(self, frame: State | Predicted | Grown | Fallback) -> None:
        """What the draft has published; raises ``Malformed``."""
        generation = (frame.state if isinstance(frame, State) else frame.stamp) >> 32
        if self._changes.is_known(frame.slot, generation):
            self._as_draft.apply(frame)

    def show(self, status: Status, link_us: int) -> None:
        """How the draft is; raises ``Malformed``."""
        show_status(self._table, status, link_us, of_service=False)

    def close(self) -> None:
        """Nobody is to wait for drafts."""
        self._table.draft["heartbeat"] = 0
        self._begun.close()

    def _handle(self, message: Request, answer: Answer) -> None:
        match message:
            case Add():
                if message.slot >= self._table.shape.slots:
                    return
                slot, generation = message.slot, message.generation
                tokens = np.array(message.tokens, "<i4").tobytes()
                sampling = message.temperature, message.seed
                self._told.append(Added(self.session, slot, generation, tokens, *sampling))
                self._changes.added(slot, generation, len(message.tokens))
            case Remove():
                self._told.append(Removed(self.session, message.slot, message.generation))
                self._changes.removed(message.slot, message.generation)
            case _:
                answer(NOT_ITS_OWN)
