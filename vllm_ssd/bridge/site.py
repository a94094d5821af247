"""The draft's end of all bridges to one draft: it serves engines of other nodes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from vllm_ssd.bridge.changes import VERSIONS, decode, encode
from vllm_ssd.bridge.mirror import read_status
from vllm_ssd.bridge.session import ANSWER_S, Session
from vllm_ssd.log import get_logger
from vllm_ssd.table import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.table.draft_names import CommonOptions
from vllm_ssd.table.heartbeat import draft_lives
from vllm_ssd.table.messages import NOT_LOADED, Wake, ask

logger = get_logger(__name__)

THREADS = 128  # calls at a time; each engine holds one, and now and then a second
SILENT_S = 5.0  # without a call from an engine's node, after which the draft leaves the engine
# Most requests of an engine that every draft allows: vLLM's largest default of max_num_seqs. An
# engine may have more requests than the draft; those without room in the draft get no drafts.
_ALLOWED_SLOTS = 1024

# The draft's part of its own table and of the engine's, as ``read_status`` has them.
Status = tuple[list[int], list[int]]


class Site:
    """Sessions of engines with one draft of this node. Whoever has the draft calls ``open`` once it
    has files, ``end_silent`` now and then, and ``stop``. The bridges of engines call the other
    methods, through Ray, each in a thread of its own."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}  # of all threads: a copy is made to go through it
        self._described = threading.Event()
        self._options: CommonOptions | None = None
        self._table: SpeculationTable | None = None

    def open(self, draft: Path, options: CommonOptions, max_num_seqs: int) -> None:
        """Serve engines of other nodes with the draft of this run directory. options: those that
        its service publishes. max_num_seqs: most requests that it serves at a time."""
        self._draft, self._options, self._most_slots = draft, options, max_num_seqs
        self._table = SpeculationTable.open(rundir.table_path(draft), writable=False)
        self._described.set()

    def end_silent(self, seconds: float) -> None:
        """End the sessions of engines that are silent. seconds: since the last call. Pauses of this
        process do not count: nothing is asked and nothing is read in them."""
        for name, session in list(self._sessions.items()):
            session.silent_s += seconds
            if session.silent_s > SILENT_S:
                self.leave(name)

    def stop(self) -> None:
        """End all sessions."""
        for name in list(self._sessions):
            self.leave(name)

    # Calls of the engines' bridges

    def describe(self) -> dict[str, Any]:
        """What the draft speaks and which options it fixes for its engines."""
        self._described.wait()
        return {"versions": VERSIONS, "options": msgspec.to_builtins(self._options)}

    def status(self) -> list[int] | None:
        """The draft's part of its own table; None before it has one."""
        table = self._table
        return None if table is None else read_status(table, draft_lives(table))

    def join(
        self,
        name: str,
        engine: str,
        shape: TableShape,
        owner: TableOwner,
        engines: int | None,
    ) -> tuple[str, Status | None]:
        """Begin a session under this name, in place of another of the engine. Returns the reason
        for a refusal and no status, or "" and the status. engine: its run directory. shape, owner:
        of its table. engines: see ``Join``."""
        if self._table is None:
            return NOT_LOADED, None
        for other, session in list(self._sessions.items()):
            if session.engine == engine:
                self.leave(other)
        refusal = self._misfit(shape, self._table.shape)
        if refusal:
            return refusal, None
        try:
            session = Session(engine, shape, owner)
        except (OSError, RuntimeError) as error:
            return str(error), None
        refusal = session.join(self._draft, engines)
        if refusal:
            session.end()
            return refusal, None
        self._sessions[name] = session
        return "", self._status_of(session)

    def push(self, name: str, changes: bytes) -> bool:
        """Take in changes of the engine; returns False if the session has ended."""
        session = self._sessions.get(name)
        if session is not None:
            session.push(decode(changes))
        return session is not None

    def pull(self, name: str) -> tuple[bytes, Status] | None:
        """The draft's changes since the last call, once there are some; None if the session has
        ended."""
        session = self._sessions.get(name)
        if session is None:
            return None
        return encode(session.pull()), self._status_of(session)

    def leave(self, name: str, asleep: bool = False) -> None:
        """End a session. asleep: the engine sleeps, so the draft may free its memory."""
        session = self._sessions.pop(name, None)
        if session is not None:
            session.end(asleep)

    def wake(self) -> None:
        """Load a draft again that sleeps."""
        ask(self._draft, Wake(), ANSWER_S)

    def _status_of(self, session: Session) -> Status:
        assert self._table is not None
        lives = draft_lives(self._table)
        return read_status(self._table, lives), read_status(session.mirror.table, lives)

    def _misfit(self, theirs: TableShape, ours: TableShape) -> str:
        """Why an engine's table does not fit the draft's, as a sentence; "" if it fits."""
        most = max(self._most_slots, _ALLOWED_SLOTS)
        if theirs.slots > most:
            return (
                f"the engine is made for {theirs.slots} requests at a time, and the draft takes "
                f"engines with at most {most}: start the engine with --max-num-seqs {most}, or the "
                f"draft server with --max-num-seqs {theirs.slots}"
            )
        if replace(theirs, slots=ours.slots) == ours:
            return ""
        return (
            f"the engine's table is made for k={theirs.k}, {theirs.branches} branches a round, "
            f"{theirs.top_m} probabilities a draft and texts' last {theirs.tail} tokens, the "
            f"draft's for k={ours.k}, {ours.branches}, {ours.top_m} and {ours.tail}: start the "
            "engine with the options of the draft and the same vllm-ssd"
        )
