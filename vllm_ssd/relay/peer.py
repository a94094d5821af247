"""What the draft's end has of a target's end: the connection, and a run directory and a table like
those of an engine on this node, so that the draft server sees no difference."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from vllm_ssd.lifecycle.joined_draft import PUT_AWAY_S
from vllm_ssd.lifecycle.own_table import OwnFiles
from vllm_ssd.protocol import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.protocol.messages import (
    NO_ANSWER,
    Add,
    ControlClient,
    Join,
    Leave,
    Remove,
    endpoint,
)
from vllm_ssd.relay.end import Connection
from vllm_ssd.relay.mirror import Mirror
from vllm_ssd.relay.records import Side
from vllm_ssd.relay.sockets import Sockets

ANSWER_S = 2.5  # for the draft server to take an engine, or to leave it


class Peer(Connection):
    """engine: what tells the engine that has joined last from all others; run_dir: its mirror's."""

    engine = ""

    def __init__(self, send: Callable[[bytes], bool], service: Path, sockets: Sockets):
        """service: run directory of the draft service."""
        super().__init__(send)
        self._service, self._sockets = service, sockets

    def join(
        self, session: int, shape: TableShape, owner: TableOwner, then: Callable[[str], None]
    ) -> None:
        """Have the draft draft for an engine with such a table; ``then`` gets "" or why it does
        not, as a sentence, unless the session ends before."""
        try:
            files = OwnFiles(shape, TableOwner(owner.model, owner.engine, os.getpid()))
        except (OSError, RuntimeError) as error:
            then(str(error))
            return
        self._files, self.run_dir = files, files.run_dir
        try:
            table = SpeculationTable.open(rundir.table_path(self.run_dir))
            self._control = ControlClient(endpoint(self.run_dir))
        except (OSError, zmq.ZMQError) as error:  # no descriptor is free
            files.remove()
            then(str(error))
            return
        table.target["started_s"] = int(time.time())  # as a target's worker does
        self.mirror = mirror = Mirror(table, session, Side.DRAFT)

        def answered(answer: str | None) -> None:
            if self.mirror is mirror:
                then(NO_ANSWER if answer is None else answer)

        self._sockets.ask(self._service, Join(str(self.run_dir)), ANSWER_S, answered)

    def tell(self, mirror: Mirror, message: Add | Remove) -> None:
        """Pass it on to the draft; raises ``Malformed``."""
        mirror.note(message)
        self._control.send(message)  # what a full queue loses the draft asks for by itself

    def leave(self, asleep: bool = False) -> None:
        """Have the draft leave the engine, and remove its files. asleep: as in ``Leave``."""
        if self.mirror is None:
            return
        self.mirror, files = None, self._files
        self._control.close()
        leave = Leave(str(self.run_dir), asleep)
        limit_s = PUT_AWAY_S if asleep else ANSWER_S
        self._sockets.ask(self._service, leave, limit_s, lambda _: files.remove())

    def remove(self) -> None:
        """Remove the files at once: the draft server notices within a second or two."""
        if self.mirror is not None:
            self._control.close()
            self._files.remove()
