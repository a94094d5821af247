"""A draft server's connection to one engine that has joined it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import msgspec

from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.table import SpeculationTable, rundir
from vllm_ssd.table.messages import Add, Remove
from vllm_ssd.table.sockets import Sockets


class ServedEngine:
    """Drafts for one engine through its table and its control socket, until ``leave``. served: the
    engine's table, joined to the draft."""

    def __init__(self, run_dir: Path, draft: DraftEngine, control: Sockets):
        """Join the engine's table to the draft. Raises ``OSError`` or ``ValueError`` if the engine
        is gone or its table does not fit this draft."""
        if not rundir.is_run_dir(run_dir):
            raise ValueError(f"{run_dir} is not the run directory of an engine of this user")
        self._requests = draft.requests
        with ExitStack() as begun:
            self._watched = rundir.open_own(run_dir, folder=True)
            begun.callback(os.close, self._watched)
            if not self.lives():
                raise ValueError(f"the engine in {run_dir} is gone")
            self.served = draft.join(SpeculationTable.open(rundir.table_path(run_dir)))
            begun.callback(draft.leave, self.served)
            socket = control.serve(run_dir, {Add: self._add, Remove: self._remove})
            begun.callback(control.remove, socket)
            self._begun = begun.pop_all()
        self.served.claim()

    def lives(self) -> bool:
        """Whether a process of the engine still runs."""
        return rundir.is_held(self._watched)

    def leave(self) -> None:
        """Stop drafting for the engine and clear its heartbeat, so that its target stops waiting.
        Raises the errors of ``DraftEngine.leave``."""
        self.served.tell("heartbeat", 0)
        self._begun.close()

    def _add(self, message: Add) -> None:
        if not self.served.is_ours:
            return  # the engine belongs to another draft and sent this before it knew that
        if message.slot >= self.served.table.shape.slots:
            raise msgspec.ValidationError(f"an engine has no slot {message.slot}")
        self._requests.add(self.served, *msgspec.structs.astuple(message))

    def _remove(self, message: Remove) -> None:
        self._requests.remove(self.served, message.slot, message.generation)
