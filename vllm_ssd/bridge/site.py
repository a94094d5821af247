"""The draft's end of all bridges to one draft: it serves engines of other nodes."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from vllm_ssd.bridge.changes import VERSIONS, Change, Changed, Plan, decode, encode
from vllm_ssd.bridge.mirror import Mirror, read_status
from vllm_ssd.bridge.records import Side
from vllm_ssd.log import get_logger
from vllm_ssd.service.joined_draft import PUT_AWAY_S
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.service.service import OtherModel
from vllm_ssd.table import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.table.draft_names import CommonOptions
from vllm_ssd.table.messages import NO_ANSWER, NOT_LOADED, ControlClient, Join, Leave, Wake, ask
from vllm_ssd.table.service_state import draft_lives

logger = get_logger(__name__)

ANSWER_S = 2.5  # timeout for the draft server to join or leave an engine
HOLD_S = 0.1  # for which ``pull`` waits for changes, and between two reports of the state
LOOK_S = 300e-6  # between two reads of the table: a call of Ray takes three times as long
THREADS = 128  # calls at a time; each engine holds one, and now and then a second
SILENT_S = 5.0  # without a call from an engine's node, after which the draft leaves the engine
# Most requests of an engine that every draft allows: vLLM's largest default of max_num_seqs. An
# engine may have more requests than the draft; those without room in the draft get no drafts.
_ALLOWED_SLOTS = 1024

# The draft's part of its own table and of the engine's, as ``read_status`` has them.
Status = tuple[list[int], list[int]]


class Session:
    """Drafts for one engine of another node until ``end``. engine: its run directory there. mirror:
    of its table. silent_s: seconds without a call from its node; whoever ends silent sessions adds
    to it."""

    def __init__(self, engine: str, shape: TableShape, owner: TableOwner):
        """Make the mirror of the engine's table; raises ``OSError`` or ``RuntimeError``."""
        self.engine = engine
        self.silent_s = 0.0
        self._files = OwnFiles(shape, TableOwner(owner.model, owner.engine, os.getpid()))
        self._run_dir = self._files.run_dir
        self._control = ControlClient(self._run_dir)
        self.mirror = Mirror(self._files.table, Side.DRAFT)
        self._turn = threading.Lock()  # held while the mirror or the control socket is used
        self._pushed = threading.Event()
        self._ended = False

    def join(self, draft: Path, engines: int | None) -> str:
        """Let the draft join the engine; returns "" or the reason for a refusal. draft: its run
        directory. engines: see ``Join``."""
        self._draft = draft
        answer = ask(draft, Join(str(self._run_dir), engines), ANSWER_S)
        return NO_ANSWER if answer is None else answer

    def push(self, changes: list[Change]) -> None:
        """Take in the engine's changes and control messages; raises ``Malformed``."""
        self.silent_s = 0.0
        with self._turn:
            for change in changes:
                if isinstance(change, (Changed, Plan)):
                    self.mirror.apply(change)
                elif not self._ended:
                    self.mirror.note(change)
                    self._control.send(change)  # if a full queue drops it, the draft asks for it
        self._pushed.set()

    def pull(self) -> list[Changed | Plan]:
        """The draft's changes since the last call. Waits up to ``HOLD_S`` seconds for some."""
        self.silent_s = 0.0
        deadline = time.monotonic() + HOLD_S
        while True:
            self._pushed.clear()
            with self._turn:
                changes = self.mirror.take()
                works = self.mirror.has_requests
            left_s = deadline - time.monotonic()
            if changes or self._ended or left_s <= 0:
                return changes
            if works:
                time.sleep(LOOK_S)
            else:
                self._pushed.wait(left_s)

    def end(self, asleep: bool = False) -> None:
        """Let the draft leave the engine, then remove the files. asleep: the engine sleeps, so the
        draft may free its memory."""
        with self._turn:
            self._ended = True
        self._pushed.set()
        self._control.close()
        limit_s = PUT_AWAY_S if asleep else ANSWER_S
        ask(self._draft, Leave(str(self._run_dir), asleep), limit_s)
        self._files.remove()


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
        model: str,
    ) -> tuple[str, Status | None]:
        """Begin a session under this name, in place of another of the engine. Returns the reason
        for a refusal and no status, or "" and the status. engine: its run directory. shape, owner:
        of its table. engines: see ``Join``. model: whose tokens the engine has compared."""
        if self._table is None or self._options is None:
            return NOT_LOADED, None
        for other, session in list(self._sessions.items()):
            if session.engine == engine:
                self.leave(other)
        refusal = self._misfit(shape, self._table.shape)
        if self._options.model != model:
            refusal = str(OtherModel(self._options.model, model))
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
