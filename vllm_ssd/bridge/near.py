"""The bridge's process on the target's node: it acts as the draft service for an engine there,
while the draft runs on another node of a Ray cluster.

It has a run directory and a table like a draft on this node. Other processes read the draft's state
from the table, and the engine joins through it. The engine core starts it and talks to it over one
socket pair (``remote_service.py``). It gets its ``NearSpec``, answers with the path of its run
directory, and ends when the socket closes.

It calls the draft's actor (``site.py``): ``push`` with the engine's changes, and ``pull``, which
returns with the draft's. If a call fails or takes ``SILENT_S``, it clears the heartbeats, so that
targets skip waiting for drafts. The engine treats the draft as lost and joins again once a draft
answers.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from vllm_ssd.bridge.changes import Change, Changed, Malformed, Plan, decode, encode
from vllm_ssd.bridge.cluster import connect, find_sites, statuses
from vllm_ssd.bridge.mirror import Mirror, show_status
from vllm_ssd.bridge.records import Side
from vllm_ssd.bridge.site import ANSWER_S, LOOK_S, Status
from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.log import get_logger
from vllm_ssd.service.detached import detach, is_closed, say
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.table import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.table.messages import LINK_LOST, Add, Join, Leave, Remove, Wake
from vllm_ssd.table.sockets import Sockets

logger = get_logger(__name__)

SILENT_S = 2.0  # timeout of a call, after which the link counts as dead
SEARCH_S = 0.5  # between two looks at the drafts, without a session
REST_S = 0.05  # between two steps without requests, when only messages bring changes
UNKNOWN_S = 1.0  # between two checks for requests that the draft does not know
KILLED_S = 10.0  # timeout for the processes of an engine that is being killed
_SMOOTHING = 8  # the mean round trip covers about this many round trips


class NearSpec(msgspec.Struct, frozen=True):
    """Start parameters of a ``Near``. engine: run directory of the engine that starts it. name: of
    the draft service. model: of its draft. ray_address: of the cluster. shape: of this process's
    own table."""

    engine: str
    name: str
    model: str
    ray_address: str
    shape: TableShape


@dataclass(eq=False)
class Session:
    """The time in which a draft serves the engine. site: the draft's actor. told: control messages
    that are not sent yet. lost: the link is dead, or the draft has left the engine."""

    name: str
    site: Any
    mirror: Mirror
    served: ServedTable
    control: zmq.Socket[bytes]
    told: list[Add | Remove] = field(default_factory=list)
    lost: bool = False


class Near:
    """Connects one engine with a draft of a service: call ``step`` until the parent is gone, then
    ``close``. A thread of its own reads from the draft. failed: this object is of no more use."""

    failed = False

    def __init__(self, spec: NearSpec, sockets: Sockets):
        """Raises ``ValueError`` with a sentence and the errors of ``OwnFiles``."""
        self._name, self._model = spec.name, spec.model
        self._ray = connect(spec.ray_address)
        self._files = OwnFiles(spec.shape, TableOwner(pid=os.getpid(), draft_server=spec.name))
        self.run_dir = self._files.run_dir
        self._table = self._files.table
        self._sockets = sockets
        sockets.serve(self.run_dir, {Join: self._join, Leave: self._leave, Wake: self._wake})
        self._sites: list[Any] = []  # the drafts; the first is the one to join
        self._session: Session | None = None
        self._link_us = 0.0
        self._turn = threading.Lock()  # held while the tables are read or written
        self._next_unknown = 0.0
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, name="ssd-bridge", daemon=True)
        self._reader.start()

    def step(self) -> None:
        """Read messages, send changes, then wait for messages or the next step."""
        self._sockets.drain()
        if self._session is not None and self._session.lost:
            self._part()
        session = self._session
        if session is not None:
            self._push(session)
        self._tend()
        works = session is not None and session.mirror.has_requests
        self._sockets.wait(LOOK_S if works else REST_S)

    def close(self) -> None:
        """Leave the draft, and remove the files of this process."""
        self._ended.set()
        self._part()
        self._reader.join(SILENT_S)
        self._sockets.close()
        self._files.remove()

    def _tend(self) -> None:
        now = time.monotonic()
        if now >= self._next_unknown:
            self._next_unknown = now + UNKNOWN_S
            if self._session is not None:
                with self._turn:
                    self._session.served.ask_for_unknown()
            rundir.touch(self.run_dir)

    # Calls of the draft's actor

    def _call(self, method: Any, *arguments: Any, limit_s: float = SILENT_S) -> Any:
        """The result of an actor's method; None if it has none, fails or takes too long."""
        try:
            return self._ray.get(method.remote(*arguments), timeout=limit_s)
        except self._ray.exceptions.RayError:
            return None

    def _push(self, session: Session) -> None:
        """Send the engine's changes."""
        with self._turn:
            told, session.told = session.told, []
            changes: list[Change] = [*told, *session.mirror.take()]
        if changes:
            began = time.monotonic_ns()
            if not self._call(session.site.push, session.name, encode(changes)):
                session.lost = True
            round_trip_us = (time.monotonic_ns() - began) / 1000
            before = self._link_us or round_trip_us
            self._link_us = before + (round_trip_us - before) / _SMOOTHING

    def _read(self) -> None:
        while not self._ended.is_set():
            session = self._session
            try:
                if session is None or session.lost:
                    self._search()
                    self._ended.wait(SEARCH_S)
                else:
                    self._pull(session)
            except Exception:  # for example, the connection to Ray is lost
                logger.exception("SSD: the bridge to %r has failed", self._name)
                self.failed = True
                return

    def _pull(self, session: Session) -> None:
        """Wait for changes of the draft, and write them."""
        answer = self._call(session.site.pull, session.name)
        if answer is None:
            session.lost = True
            return
        message, status = answer
        changes = decode(message)
        with self._turn:
            if session is self._session:
                self._show(session.mirror, status)
                for change in changes:
                    if isinstance(change, (Changed, Plan)):
                        session.mirror.apply(change)

    def _search(self) -> None:
        """Look for the drafts of the service. Puts the one with the fewest engines first, and shows
        its state."""
        try:
            found = statuses(find_sites(self._name), SILENT_S)
        except (self._ray.exceptions.RayError, ValueError):  # the cluster's head does not answer
            found = []
        joined = (self._table.draft.dtype.names or ()).index("joined")
        found.sort(key=lambda one: (one[1][0] < 0, one[1][joined]))  # those that serve are first
        with self._turn:
            if self._session is not None:
                return
            self._sites = [site for site, _ in found]
            if found:
                show_status(self._table, found[0][1], self._link_us, engine=False)
            else:
                self._table.draft["heartbeat"] = self._table.draft["away"] = 0

    def _show(self, mirror: Mirror, status: Status) -> None:
        service, engine = status
        show_status(self._table, service, self._link_us, engine=False)
        show_status(mirror.table, engine, self._link_us, engine=True)

    # Requests of the engine

    def _leave(self, message: Leave) -> str:
        # The draft's memory is on another node, so a sleeping engine need not wait for it.
        self._part(message.asleep)
        return ""

    def _wake(self, message: Wake) -> str:
        for site in self._sites:
            site.wake.remote()
        return ""

    def _join(self, message: Join) -> str:
        """Begin a session; returns "" or the reason for a refusal."""
        self._part()
        sites, name = self._sites, secrets.token_hex(8)  # the reader sets others
        if not sites:
            return LINK_LOST
        site = sites[0]
        run_dir = Path(message.run_dir)
        try:
            table = SpeculationTable.open(rundir.table_path(run_dir))
        except (OSError, ValueError) as error:
            return str(error)
        arguments = name, message.run_dir, table.shape, table.owner, message.engines, self._model
        answer = self._call(site.join, *arguments, limit_s=2 * ANSWER_S)
        if answer is None:
            return LINK_LOST
        refusal, status = answer
        if refusal:
            return str(refusal)
        mirror = Mirror(table, Side.TARGET)

        def note(message: Add | Remove) -> None:
            with suppress(Malformed), self._turn:
                mirror.note(message)
                session.told.append(message)

        try:
            control = self._sockets.serve(run_dir, {Add: note, Remove: note})
        except OSError as error:
            site.leave.remote(name)
            return str(error)
        session = Session(name, site, mirror, ServedTable(table), control)
        with self._turn:
            self._show(mirror, status)
            session.served.take_over()
            self._session = session
        return ""

    def _part(self, asleep: bool = False) -> None:
        """End the session and clear the heartbeats, so that the target skips waiting. asleep: the
        engine sleeps, so the draft may free its memory."""
        with self._turn:
            session, self._session = self._session, None
            if session is None:
                return
            self._table.draft["heartbeat"] = session.mirror.table.draft["heartbeat"] = 0
        self._sockets.remove(session.control)
        session.site.leave.remote(session.name, asleep)


def _put_away(engine: Path) -> None:
    """Remove the files of a killed engine once all its processes have ended. Gives up after
    ``KILLED_S`` seconds."""
    deadline = time.monotonic() + KILLED_S
    while rundir.is_alive(engine):
        if time.monotonic() >= deadline:
            return
        time.sleep(REST_S)
    rundir.remove(engine)


def main() -> None:
    """Entry point, for a process that ``RemoteService`` has started."""
    channel, spec = detach(NearSpec)
    sockets = Sockets()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # reaches ``finally`` below
    try:
        near = Near(spec, sockets)
    except (OSError, RuntimeError, ValueError) as error:
        say(channel, "failed", str(error))
        sockets.close()
        return
    say(channel, "ready", str(near.run_dir))
    try:
        while not (is_closed(channel) or near.failed):
            near.step()
    finally:
        near.close()
        channel.close()  # the engine, if it lives, may start another one
        if rundir.is_run_dir(engine := Path(spec.engine)):
            _put_away(engine)


if __name__ == "__main__":
    main()
