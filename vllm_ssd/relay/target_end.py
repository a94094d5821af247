"""The target's end of a relay: a process on the target's node that is, to an engine there, a draft
of a service like any other, while the draft is on another node.

It has a run directory and a table as a service has them, in which everybody sees how the draft is,
and takes the engines that ask to join. The engine core starts it (``relay/remote_draft.py``) and
talks to it over one socket pair: it is told its ``TargetEndSpec`` and says where its run directory
is; it ends with the socket.

When it hears nothing for ``SILENT_S`` it clears all heartbeats, so that nobody waits for drafts,
and makes a new connection; the engines take the draft for lost then, and join again once it is
back.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from vllm_ssd.lifecycle.own_table import OwnFiles
from vllm_ssd.log import get_logger
from vllm_ssd.protocol import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.protocol.messages import LINK_LOST, NOT_ITS_OWN, Join, Leave, Request, Wake
from vllm_ssd.relay.finding import Where, contacts, describe
from vllm_ssd.relay.frames import (
    Changed,
    Close,
    Hello,
    Malformed,
    Opened,
    Ping,
    Pong,
    Refused,
    Status,
    Told,
    ToTarget,
    Welcome,
    decode_to_target,
)
from vllm_ssd.relay.link import TargetLink
from vllm_ssd.relay.mirror import show_status
from vllm_ssd.relay.outbox import Outbox
from vllm_ssd.relay.process import run
from vllm_ssd.relay.relayed_engine import RelayedEngine
from vllm_ssd.relay.sockets import REST_S, Answer, Sockets, pause_s

logger = get_logger(__name__)

SILENT_S = 1.0  # without a message, after which the link counts as dead
# Until another connection after one that was refused: the first time, and the most, as it doubles
# each time. A connection that was good for a while makes up for those before it.
REFUSED_S, _LONGEST_S, _GOOD_S = 1.0, 30.0, 10.0
PING_S = 0.1  # between two questions how the draft is
_UNKNOWN_S = 1.0  # between two looks for requests that the draft was not told of
_LINGER_MS = 200  # for the last words to the other end
_KILLED_S = 10.0  # for the processes of an engine that is being killed
_SMOOTHING = 8  # round trips over which their mean is taken, about


class TargetEndSpec(msgspec.Struct, frozen=True):
    """engine: the run directory of the one that starts it; where: the draft service is; place: of
    the draft among its drafts; k, branches, top_m: of the tables of its engines."""

    engine: str
    where: Where
    place: int
    k: int
    branches: int
    top_m: int


class TargetEnd:
    """``step`` until its parent is gone; then ``close``."""

    ended = False

    def __init__(self, spec: TargetEndSpec, sockets: Sockets):
        """Raises ``ValueError`` if the service cannot be found, and as ``OwnFiles``."""
        self._where, self._place = spec.where, spec.place
        self._sockets = sockets
        self._contact = contacts(spec.where)[spec.place]
        describe(self._contact, spec.where.name)  # which says what is wrong
        shape = TableShape(1, spec.k, spec.branches, top_m=spec.top_m)
        owner = TableOwner(pid=os.getpid(), draft_server=spec.where.name)
        self._files = OwnFiles(shape, owner)
        self.run_dir = self._files.run_dir
        self.word = str(self.run_dir)
        self._table = SpeculationTable.open(rundir.table_path(self.run_dir))
        self._table.target["started_s"] = int(time.time())  # as a target's worker does
        sockets.serve(self.run_dir, self._handle)
        self._engines: dict[int, RelayedEngine] = {}  # by the numbers of their sessions
        self._awaiting: dict[int, Answer] = {}  # who is told whether the draft drafts for it
        self._session = 0
        self._refusal = ""  # why the last connection was refused
        self._pause_s = REFUSED_S
        self._link_us = 0.0
        self._next_ping = self._next_look = 0.0
        self._next_touch = time.monotonic() + rundir.TOUCH_S
        self._connect()

    def step(self) -> None:
        """One look at everything, and a pause."""
        self._sockets.drain()
        now = time.monotonic()
        if now >= self._renew_at:
            self._reconnect()
        if now >= self._next_ping and not self._over:
            self._next_ping = now + PING_S
            self._outbox.add(Ping(time.monotonic_ns(), round(self._link_us)))
        if now >= self._next_look:
            self._next_look = now + _UNKNOWN_S
            self._look_after(now)
        mirrors = [engine.mirror for engine in self._engines.values()]
        self._outbox.flush([mirror.take for mirror in mirrors])
        requests = any(mirror.has_requests for mirror in mirrors)
        self._sockets.wait(pause_s(self._link_us) if requests else REST_S)

    def close(self) -> None:
        """Leave nothing behind."""
        for session in list(self._engines):
            self._part(session)
        self._outbox.flush()
        self._link.close(_LINGER_MS)
        self._sockets.close()
        self._files.remove()

    def _connect(self) -> None:
        self._link = TargetLink(self._sockets, self._contact, self._read)
        self._outbox = Outbox(self._link.send)
        self._outbox.add(Hello(self._where.name))
        self._over = False  # nothing more is heard or asked on this connection
        self._connected = time.monotonic()
        self._renew_at = self._connected + SILENT_S

    def _reconnect(self) -> None:
        self._end_sessions()
        self._link.close()
        with suppress(ValueError, IndexError):  # the former one may become right again
            self._contact = contacts(self._where)[self._place]
        self._connect()

    def _end_sessions(self) -> None:
        """The link is dead, and all of them with it."""
        self._table.draft["heartbeat"] = self._table.draft["away"] = 0
        for session in list(self._engines):
            self._part(session)

    def _refused(self, why: str) -> None:
        """The ends do not understand each other: try it again, less and less often. Each cause is
        logged once."""
        self._end_sessions()
        self._over = True
        self._renew_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_S)
        if why != self._refusal:
            self._refusal = why
            logger.warning("SSD: the relay of %r: %s", self._where.name, why)

    def _look_after(self, now: float) -> None:
        for session, engine in list(self._engines.items()):
            if not engine.lives():
                self._part(session)
            elif session not in self._awaiting:
                engine.ask_for_unknown()
        if now >= self._next_touch:
            self._next_touch = now + rundir.TOUCH_S
            rundir.touch(self.run_dir)

    def _part(self, session: int, asleep: bool = False) -> None:
        """Draft for this engine no longer. asleep: as in ``Leave``."""
        engine = self._engines.pop(session, None)
        if engine is not None:
            engine.close()
            self._outbox.add(Close(session, asleep))
        answer = self._awaiting.pop(session, None)
        if answer is not None:
            answer(LINK_LOST)

    # What the engines ask

    def _handle(self, message: Request, answer: Answer) -> None:
        match message:
            case Join():
                self._join(Path(message.run_dir), answer)
            case Leave():
                for session, engine in list(self._engines.items()):
                    if engine.run_dir == Path(message.run_dir):
                        self._part(session, message.asleep)
                # A draft on another node has no memory that who sleeps here waits for.
                answer("")
            case Wake():
                self._outbox.add(Told(0, message))
                answer("")
            case _:
                answer(NOT_ITS_OWN)

    def _join(self, run_dir: Path, answer: Answer) -> None:
        for session, engine in list(self._engines.items()):
            if engine.run_dir == run_dir:
                self._part(session)
        self._session += 1
        try:
            engine = RelayedEngine(run_dir, self._session)
        except (OSError, ValueError) as error:
            answer(str(error))
            return
        self._engines[self._session] = engine
        self._awaiting[self._session] = answer
        self._outbox.add(engine.opening())

    # What the other end says

    def _read(self, message: bytes) -> None:
        if self._over:
            return
        try:
            for frame in decode_to_target(message):
                self._take(frame)
        except Malformed as error:
            self._refused(str(error))
            return
        now = time.monotonic()
        self._renew_at = now + SILENT_S
        if now - self._connected > _GOOD_S:
            self._refusal, self._pause_s = "", REFUSED_S

    def _take(self, frame: ToTarget) -> None:
        match frame:
            case Welcome():
                pass
            case Refused():
                raise Malformed(frame.why)
            case Pong():
                self._measure((time.monotonic_ns() - frame.sent_ns) / 1000)
            case Status():
                self._show(frame)
            case Opened():
                self._opened(frame)
            case Changed():
                if frame.session in self._engines:
                    self._engines[frame.session].mirror.apply(frame)

    def _measure(self, round_trip_us: float) -> None:
        before = self._link_us or round_trip_us
        self._link_us = before + (round_trip_us - before) / _SMOOTHING

    def _show(self, status: Status) -> None:
        if not status.session:
            show_status(self._table, status, self._link_us)
        elif status.session in self._engines:
            show_status(self._engines[status.session].table, status, self._link_us)

    def _opened(self, opened: Opened) -> None:
        answer = self._awaiting.pop(opened.session, None)
        engine = self._engines.get(opened.session)
        if answer is None or engine is None:
            return
        refusal = opened.refusal
        if not refusal:
            try:
                engine.begin(self._sockets, self._outbox.add)
            except OSError as error:
                refusal = str(error)
        if refusal:
            self._part(opened.session)
        answer(refusal)


def _put_away(engine: Path) -> None:
    """What an engine that was killed has left, once all its processes have ended."""
    deadline = time.monotonic() + _KILLED_S
    while rundir.is_alive(engine):
        if time.monotonic() >= deadline:
            return
        time.sleep(REST_S)
    rundir.remove(engine)


if __name__ == "__main__":
    import sys

    run(sys.argv[1], TargetEndSpec, TargetEnd, lambda spec: _put_away(Path(spec.engine)))
