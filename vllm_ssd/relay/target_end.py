"""The target's end of a relay: a process on the target's node that acts as the draft service for an
engine there, while the draft runs on another node.

It has a run directory and a table like a draft on this node. Other processes read the draft's state
from the table, and engines join through it. The engine core starts it (``relay/remote_service.py``)
and talks to it over one socket pair. It receives its ``TargetEndSpec``, answers with the path of
its run directory, and ends when the socket closes.

After ``SILENT_S`` without a message it clears all heartbeats, so that targets skip waiting for
drafts, and connects anew. The engine treats the draft as lost and joins again once it is back.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.lifecycle.own_table import OwnFiles
from vllm_ssd.log import get_logger
from vllm_ssd.protocol import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.protocol.messages import (
    LINK_LOST,
    NOT_ITS_OWN,
    Add,
    Join,
    Leave,
    Remove,
    Request,
    Wake,
)
from vllm_ssd.protocol.sockets import Answer, Sockets, by_type
from vllm_ssd.relay.end import REST_S, Connection, End, run
from vllm_ssd.relay.frames import (
    Changed,
    Hello,
    Joined,
    Malformed,
    Opening,
    Ping,
    Refused,
    Status,
    Told,
    ToTarget,
    decode_to_target,
)
from vllm_ssd.relay.keys import read_keys
from vllm_ssd.relay.link import TargetLink
from vllm_ssd.relay.mirror import Mirror, show_status
from vllm_ssd.relay.records import Side

logger = get_logger(__name__)

SILENT_S = 1.0  # timeout without a message, after which the link counts as dead
REFUSED_S = 2.0  # pause before the next connection after a refusal
_UNKNOWN_S = 1.0  # between two checks for requests that the draft does not know
_LINGER_MS = 200  # timeout for sending the last messages to the other end
_KILLED_S = 10.0  # timeout for the processes of an engine that is being killed
_SMOOTHING = 8  # the mean round trip covers about this many round trips


class TargetEndSpec(msgspec.Struct, frozen=True):
    """Start parameters of a ``TargetEnd``. engine: run directory of the engine that starts it.
    name: the draft service. key_file: path of its key file. place: index of the draft in that.
    shape: of this end's own table."""

    engine: str
    name: str
    key_file: str
    place: int
    shape: TableShape


class TargetEnd(End[Connection]):
    """Connects one engine with a draft on another node until its parent is gone."""

    def __init__(self, spec: TargetEndSpec, sockets: Sockets):
        """Raises the errors of ``read_keys`` and ``OwnFiles``."""
        super().__init__(sockets)
        self._name, self._key_file, self._place = spec.name, Path(spec.key_file), spec.place
        self._parent = Path(spec.engine)
        self._keys = read_keys(self._key_file, spec.name)
        owner = TableOwner(pid=os.getpid(), draft_server=spec.name)
        self._files = OwnFiles(spec.shape, owner)
        self.run_dir = self._files.run_dir
        self.word = str(self.run_dir)
        self._table = self._files.table
        sockets.serve(self.run_dir, self._handle)
        self._engine = ExitStack()  # resources of the engine's session
        self._awaiting: Answer | None = None  # sends the engine the answer to its ``Join``
        self._refusal = ""  # why a connection was refused, until an engine joins
        self._next_unknown = 0.0
        self._connect()

    def _tend(self, now: float) -> None:
        if self._peer.silent_s > (REFUSED_S if self._over else SILENT_S):
            self._end_session()
            self._link.close()
            with suppress(ValueError):  # keep the former keys: they may become right again
                keys = read_keys(self._key_file, self._name)
                self._keys = keys if self._place < len(keys.addresses) else self._keys
            self._connect()
        if not self._over:
            self._peer.add(Ping(time.monotonic_ns(), round(self._peer.link_us)))
        if now >= self._next_unknown:
            self._next_unknown = now + _UNKNOWN_S
            if self._peer.mirror is not None and self._awaiting is None:
                self._served.ask_for_unknown()
            rundir.touch(self.run_dir)

    def close(self) -> None:
        self._end_session()
        self._peer.flush()
        self._link.close(_LINGER_MS)
        self._sockets.close()
        self._files.remove()
        if rundir.is_run_dir(self._parent):
            _put_away(self._parent)

    def _connect(self) -> None:
        self._link = TargetLink(self._sockets, self._keys, self._place, self._read)
        self._peer = self._peers[b""] = Connection(self._link.send)
        self._peer.add(Hello())
        self._over = False  # True: this end ignores and asks nothing more on this connection

    def _end_session(self) -> None:
        """Handle a dead link: clear the heartbeats and part with the engine."""
        self._table.draft["heartbeat"] = self._table.draft["away"] = 0
        self._part()

    def _refused(self, why: str) -> None:
        """End the session after a refusal or a malformed message, and connect again after
        ``REFUSED_S`` seconds. Logs each cause once."""
        self._end_session()
        self._over, self._peer.silent_s = True, 0.0
        if why != self._refusal:
            self._refusal = why
            logger.warning("SSD: the relay of %r: %s", self._name, why)

    def _part(self, asleep: bool = False) -> None:
        """End the engine's session and clear its heartbeat, so that its target skips waiting.
        asleep: the engine sleeps, so the draft may free its memory."""
        mirror = self._peer.mirror
        if mirror is None:
            return
        self._peer.mirror = None
        mirror.table.draft["heartbeat"] = 0
        self._peer.add(Told(Leave("", asleep)))
        self._engine.close()
        self._answer(LINK_LOST)

    def _answer(self, text: str) -> None:
        """Answer the engine's ``Join`` if it waits for that."""
        answer, self._awaiting = self._awaiting, None
        if answer is not None:
            answer(text)

    # Requests of the engine

    def _handle(self, message: Request, answer: Answer) -> None:
        match message:
            case Join():
                self._part()
                self._join(message, answer)
            case Leave():
                self._part(message.asleep)
                # The draft's memory is on another node, so a sleeping engine need not wait for it.
                answer("")
            case Wake():
                self._peer.add(Told(message))
                answer("")
            case _:
                answer(NOT_ITS_OWN)

    def _join(self, message: Join, answer: Answer) -> None:
        self._run_dir = Path(message.run_dir)
        try:
            table = SpeculationTable.open(rundir.table_path(self._run_dir))
        except (OSError, ValueError) as error:
            answer(str(error))
            return
        self._awaiting, self._served = answer, ServedTable(table)
        self._peer.mirror = Mirror(table, Side.TARGET)
        self._peer.add(Opening(message.run_dir, table.shape, table.owner))

    def _begin(self, mirror: Mirror) -> None:
        """Pass the engine's control messages on, and ask the engine for all its requests. Raises
        ``OSError`` if the engine's control address cannot be bound."""

        def note(message: Add | Remove) -> None:
            with suppress(Malformed):
                mirror.note(message)
                self._peer.add(Told(message))

        control = self._sockets.serve(self._run_dir, by_type({Add: note, Remove: note}))
        self._engine.callback(self._sockets.remove, control)
        self._served.take_over()

    # Messages of the other end

    def _read(self, message: bytes) -> None:
        if self._over:
            return
        try:
            for frame in decode_to_target(message):
                self._take(frame)
        except Malformed as error:
            self._refused(str(error))
            return
        self._peer.silent_s = 0.0

    def _take(self, frame: ToTarget) -> None:
        peer = self._peer
        match frame:
            case Refused():
                raise Malformed(frame.why)
            case Status():
                if frame.sent_ns:
                    round_trip_us = (time.monotonic_ns() - frame.sent_ns) / 1000
                    before = peer.link_us or round_trip_us
                    peer.link_us = before + (round_trip_us - before) / _SMOOTHING
                show_status(self._table, frame.service, peer.link_us, engine=False)
                if peer.mirror is not None and frame.engine:
                    show_status(peer.mirror.table, frame.engine, peer.link_us, engine=True)
            case Changed() if peer.mirror is not None:
                peer.mirror.apply(frame)
            case Joined() if peer.mirror is not None:
                self._joined(peer.mirror, frame.refusal)

    def _joined(self, mirror: Mirror, refusal: str) -> None:
        """Take in the answer to ``Opening``. That to an earlier one may come so late that it is
        taken for this one's. So a refusal ends a session that has begun, too."""
        if not refusal:
            if self._awaiting is None:
                return
            try:
                self._begin(mirror)
            except OSError as error:
                refusal = str(error)
        self._answer(refusal)
        if refusal:
            self._part()
        else:
            self._refusal = ""


def _put_away(engine: Path) -> None:
    """Remove the files of a killed engine once all its processes have ended. Gives up after
    ``_KILLED_S`` seconds."""
    deadline = time.monotonic() + _KILLED_S
    while rundir.is_alive(engine):
        if time.monotonic() >= deadline:
            return
        time.sleep(REST_S)
    rundir.remove(engine)


if __name__ == "__main__":
    run(TargetEndSpec, TargetEnd)
