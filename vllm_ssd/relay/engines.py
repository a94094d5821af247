"""What each end of a relay has of an engine: its table, which both mirror, and its control
messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq

from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.lifecycle.joined_draft import PUT_AWAY_S
from vllm_ssd.lifecycle.own_table import OwnFiles
from vllm_ssd.protocol import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.protocol.messages import (
    NO_ANSWER,
    NOT_ITS_OWN,
    Add,
    ControlClient,
    Join,
    Leave,
    Remove,
    Request,
    endpoint,
)
from vllm_ssd.relay.connection import Connection
from vllm_ssd.relay.frames import Malformed, Told
from vllm_ssd.relay.mirror import Mirror
from vllm_ssd.relay.records import Side
from vllm_ssd.relay.sockets import Answer, Sockets

ANSWER_S = 2.5  # for the draft server to take an engine, or to leave it


class RelayedEngine:
    """Target's end: an engine on this node, whose control socket a draft server has elsewhere.
    answer: who is told whether the draft drafts for it, None once that is known. ``begin`` then,
    until ``close``."""

    def __init__(self, run_dir: Path, session: int, answer: Answer, sockets: Sockets):
        """Raises ``OSError`` and ``ValueError`` if there is no such engine."""
        self.answer: Answer | None = answer
        self.table = SpeculationTable.open(rundir.table_path(run_dir))
        self.served = ServedTable(self.table)
        self.mirror = Mirror(self.table, session, Side.TARGET)
        self._run_dir, self._sockets = run_dir, sockets
        self._control: zmq.Socket[bytes] | None = None

    def begin(self, peer: Connection[RelayedEngine]) -> None:
        """Pass its control messages on, and have it send all its requests; ``OSError`` if that
        fails."""

        def handle(message: Request, answer: Answer) -> None:
            if not isinstance(message, (Add, Remove)):
                answer(NOT_ITS_OWN)
                return
            with suppress(Malformed):
                self.mirror.note(message)
                peer.add(Told(self.mirror.session, message))

        self._control = self._sockets.serve(self._run_dir, handle)
        self.served.take_over()

    def close(self) -> None:
        """Nobody is to wait for drafts."""
        self.table.draft["heartbeat"] = 0
        if self._control is not None:
            self._sockets.remove(self._control)


class MirroredEngine:
    """Draft's end: a run directory and a table, like those of an engine on this node, so that the
    draft server sees no difference. From ``join`` to ``close``."""

    def __init__(
        self,
        name: str,
        session: int,
        shape: TableShape,
        owner: TableOwner,
        service: Path,
        sockets: Sockets,
    ):
        """name: what tells it from all other engines; ``service``: run directory of the draft
        service. Raises as ``OwnFiles`` and, without a free descriptor, ``zmq.ZMQError``."""
        self.name, self._service, self._sockets = name, service, sockets
        self._files = OwnFiles(shape, TableOwner(owner.model, owner.engine, os.getpid()))
        self.run_dir = self._files.run_dir
        try:
            self.table = SpeculationTable.open(rundir.table_path(self.run_dir))
            self._control = ControlClient(endpoint(self.run_dir))
        except BaseException:
            self._files.remove()
            raise
        self.table.target["started_s"] = int(time.time())  # as a target's worker does
        self.mirror = Mirror(self.table, session, Side.DRAFT)

    def join(self, then: Callable[[str], None]) -> None:
        """Have the draft draft for it; ``then`` gets "" or why it does not, as a sentence."""
        self._sockets.ask(
            self._service,
            Join(str(self.run_dir)),
            ANSWER_S,
            lambda answer: then(NO_ANSWER if answer is None else answer),
        )

    def tell(self, message: Add | Remove) -> None:
        """Pass it on to the draft; raises ``Malformed``."""
        self.mirror.note(message)
        self._control.send(message)  # what a full queue loses the draft asks for by itself

    def close(self, asleep: bool = False) -> None:
        """Have the draft leave it, and remove it. asleep: as in ``Leave``."""
        self._control.close()
        leave = Leave(str(self.run_dir), asleep)
        limit_s = PUT_AWAY_S if asleep else ANSWER_S
        self._sockets.ask(self._service, leave, limit_s, lambda _: self._files.remove())

    def remove(self) -> None:
        """Remove it at once: the draft server notices within a second or two."""
        self._control.close()
        self._files.remove()
