"""An engine of another node on the draft's node: a run directory and a table like those of an
engine here, so the draft server sees no difference."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from vllm_ssd.bridge.changes import Change, Changed, Plan
from vllm_ssd.bridge.mirror import Mirror
from vllm_ssd.bridge.records import Side
from vllm_ssd.service.joined_draft import PUT_AWAY_S
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.table import TableOwner, TableShape
from vllm_ssd.table.messages import NO_ANSWER, ControlClient, Join, Leave, ask, endpoint

ANSWER_S = 2.5  # timeout for the draft server to join or leave an engine
HOLD_S = 0.1  # for which ``pull`` waits for changes, and between two reports of the state
LOOK_S = 300e-6  # between two reads of the table: a call of Ray takes three times as long


class Session:
    """Drafts for one engine of another node until ``end``. engine: its run directory there. mirror:
    of its table.
    silent_s: seconds without a call from its node; whoever ends silent sessions adds to it."""

    def __init__(self, engine: str, shape: TableShape, owner: TableOwner):
        """Make the mirror of the engine's table; raises ``OSError`` or ``RuntimeError``."""
        self.engine = engine
        self.silent_s = 0.0
        self._files = OwnFiles(shape, TableOwner(owner.model, owner.engine, os.getpid()))
        self._run_dir = self._files.run_dir
        self._control = ControlClient(endpoint(self._run_dir))
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
        draft may free its memory. A second call does nothing."""
        with self._turn:
            ended, self._ended = self._ended, True
        if not ended:
            self._pushed.set()
            self._control.close()
            limit_s = PUT_AWAY_S if asleep else ANSWER_S
            ask(self._draft, Leave(str(self._run_dir), asleep), limit_s)
            self._files.remove()
