"""What the draft's end has of an engine on another node: a run directory and a table, like that of
an engine on this one, so that the draft server sees no difference."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from vllm_ssd.lifecycle.joined_draft import PUT_AWAY_S
from vllm_ssd.lifecycle.own_table import OwnFiles
from vllm_ssd.protocol import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.protocol.messages import NO_ANSWER, Add, ControlClient, Join, Leave, Remove, endpoint
from vllm_ssd.relay.frames import Open, Status
from vllm_ssd.relay.mirror import Mirror, read_status
from vllm_ssd.relay.records import Side
from vllm_ssd.relay.sockets import Sockets

ANSWER_S = 2.5  # for the draft server to take it, or to leave it


class MirroredEngine:
    """From ``join`` to ``close``. engine: its name."""

    def __init__(self, opened: Open, service: Path, sockets: Sockets):
        """``service``: run directory of the draft service. Raises as ``OwnFiles`` and, without a
        free descriptor, ``zmq.ZMQError``."""
        self.engine = opened.engine
        self._session, self._service, self._sockets = opened.session, service, sockets
        shape = TableShape(opened.slots, opened.k, opened.branches, opened.tail, opened.top_m)
        self._files = OwnFiles(shape, TableOwner(opened.model, opened.index, os.getpid()))
        self._run_dir = self._files.run_dir
        try:
            self._table = SpeculationTable.open(rundir.table_path(self._run_dir))
            self._control = ControlClient(endpoint(self._run_dir))
        except BaseException:
            self._files.remove()
            raise
        self._table.target["started_s"] = int(time.time())  # as a target's worker does
        self.mirror = Mirror(self._table, self._session, Side.DRAFT)

    def join(self, then: Callable[[str], None]) -> None:
        """Have the draft draft for it; ``then`` gets "" or why it does not, as a sentence."""
        self._sockets.ask(
            self._service,
            Join(str(self._run_dir)),
            ANSWER_S,
            lambda answer: then(NO_ANSWER if answer is None else answer),
        )

    def tell(self, message: Add | Remove) -> None:
        """Pass it on to the draft; raises ``Malformed``."""
        self.mirror.note(message)
        self._control.send(message)  # what a full queue loses the draft asks for by itself

    def status(self, lives: bool) -> Status:
        """lives: whether the service does."""
        return read_status(self._table, self._session, lives)

    def close(self, asleep: bool = False) -> None:
        """Have the draft leave it, and remove it. asleep: as in ``Leave``."""
        self._control.close()
        leave = Leave(str(self._run_dir), asleep)
        limit_s = PUT_AWAY_S if asleep else ANSWER_S
        self._sockets.ask(self._service, leave, limit_s, lambda _: self._files.remove())

    def remove(self) -> None:
        """Remove it at once: the draft server notices within a second or two."""
        self._control.close()
        self._files.remove()
