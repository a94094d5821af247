"""What the target's end has of an engine on its node: a side of the mirror of its table, and the
end of its control socket that a draft server has elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.protocol import SpeculationTable, rundir
from vllm_ssd.protocol.messages import NOT_ITS_OWN, Add, Remove, Request
from vllm_ssd.relay.frames import Malformed, Open, Told
from vllm_ssd.relay.mirror import Mirror
from vllm_ssd.relay.records import Side
from vllm_ssd.relay.sockets import Answer, Sockets


class RelayedEngine:
    """``begin`` once the draft drafts for it, until ``close``."""

    def __init__(self, run_dir: Path, session: int):
        """Raises ``OSError`` and ``ValueError`` if there is no such engine."""
        if not rundir.is_run_dir(run_dir):
            raise ValueError(f"{run_dir} is not the run directory of an engine of this user")
        self.run_dir = run_dir
        self._session = session
        self.table = SpeculationTable.open(rundir.table_path(run_dir))
        self._served = ServedTable(self.table)
        self.mirror = Mirror(self.table, session, Side.TARGET)
        self._held = ExitStack()
        self._watched = rundir.watch(run_dir)
        self._held.callback(os.close, self._watched)
        if not self.lives():
            self._held.close()
            raise ValueError(f"the engine in {run_dir} is gone")

    def opening(self) -> Open:
        """How the draft's end is told of it."""
        shape, owner = self.table.shape, self.table.owner
        sizes = shape.slots, shape.k, shape.branches, shape.tail, shape.top_m
        return Open(self._session, self.run_dir.name, *sizes, owner.model, owner.engine)

    def begin(self, sockets: Sockets, tell: Callable[[Told], None]) -> None:
        """Pass its control messages on, and have it send all its requests; ``OSError`` if that
        fails."""

        def handle(message: Request, answer: Answer) -> None:
            if not isinstance(message, (Add, Remove)):
                answer(NOT_ITS_OWN)
                return
            try:
                self.mirror.note(message)
            except Malformed:
                return
            tell(Told(self._session, message))

        socket = sockets.serve(self.run_dir, handle)
        self._held.callback(sockets.remove, socket)
        self._served.take_over()

    def lives(self) -> bool:
        """Whether the engine is still there."""
        return rundir.is_held(self._watched)

    def ask_for_unknown(self) -> None:
        """Once a second: requests that the draft was not told of."""
        self._served.ask_for_unknown()

    def close(self) -> None:
        """Nobody is to wait for drafts."""
        self.table.draft["heartbeat"] = 0
        self._held.close()
