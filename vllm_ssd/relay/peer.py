"""A target's end, seen from the draft's end: the connection, a run directory and a table. They look
like those of an engine on this node, so the draft server sees no difference."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import zmq

from vllm_ssd.lifecycle.joined_draft import PUT_AWAY_S
from vllm_ssd.lifecycle.own_table import OwnFiles
from vllm_ssd.protocol import TableOwner, TableShape
from vllm_ssd.protocol.messages import (
    NO_ANSWER,
    Add,
    ControlClient,
    Join,
    Leave,
    Remove,
    endpoint,
)
from vllm_ssd.protocol.sockets import Sockets
from vllm_ssd.relay.end import Connection
from vllm_ssd.relay.mirror import Mirror
from vllm_ssd.relay.records import Side

ANSWER_S = 2.5  # timeout for the draft server to join or leave an engine


class Peer(Connection):
    """The connection to one target's end, and the mirror of its engine. engine: identity of the
    engine that joined last. run_dir: run directory of the mirror."""

    engine = ""

    def __init__(self, send: Callable[[bytes], bool], service: Path, sockets: Sockets):
        """service: run directory of the draft."""
        super().__init__(send)
        self._service, self._sockets = service, sockets

    def join(self, shape: TableShape, owner: TableOwner, then: Callable[[str], None]) -> None:
        """Make a mirror of the engine's table and let the draft join it. Calls ``then`` with "" or
        with the reason for a refusal, as a sentence, unless the session ends earlier."""
        try:
            files = OwnFiles(shape, TableOwner(owner.model, owner.engine, os.getpid()))
        except (OSError, RuntimeError) as error:
            then(str(error))
            return
        self._files, self.run_dir = files, files.run_dir
        try:
            self._control = ControlClient(endpoint(self.run_dir))
        except zmq.ZMQError as error:  # no file descriptor is free
            files.remove()
            then(str(error))
            return
        self.mirror = mirror = Mirror(files.table, Side.DRAFT)

        def answered(answer: str | None) -> None:
            if self.mirror is mirror:
                then(NO_ANSWER if answer is None else answer)

        self._sockets.ask(self._service, Join(str(self.run_dir)), ANSWER_S, answered)

    def tell(self, message: Add | Remove) -> None:
        """Pass a request's start or end on to the draft; raises ``Malformed``."""
        if self.mirror is not None:
            self.mirror.note(message)
            self._control.send(message)  # if a full queue drops it, the draft asks for the request

    def leave(self, asleep: bool = False) -> None:
        """Let the draft leave the engine, then remove the mirror's files, at the latest when the
        sockets are closed. asleep: the engine sleeps, so the draft may free its memory."""
        if self.mirror is None:
            return
        self.mirror, files = None, self._files
        self._control.close()
        leave = Leave(str(self.run_dir), asleep)
        limit_s = PUT_AWAY_S if asleep else ANSWER_S
        self._sockets.ask(self._service, leave, limit_s, lambda _: files.remove())
