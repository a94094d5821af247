"""Reads the state of a draft from its run directory, for engines that may join it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from vllm_ssd.protocol import SpeculationTable, rundir
from vllm_ssd.protocol.service_state import State, state_of


class FoundDraft:
    """One draft of a draft service, described by its own table and the lock of its run directory.
    Its file is closed when the object is dropped."""

    def __init__(self, run_dir: Path):
        """Raises the errors of ``rundir.watch`` and ``SpeculationTable.open``."""
        self.run_dir = run_dir
        self._table = SpeculationTable.open(rundir.table_path(run_dir), writable=False)
        self._watched = rundir.watch(run_dir)
        weakref.finalize(self, os.close, self._watched)

    @property
    def pid(self) -> int:
        """Process id of the draft."""
        return int(self._table.draft["pid"][0])

    @property
    def engines(self) -> int:
        """Number of engines for which the draft drafts."""
        return int(self._table.draft["joined"][0])

    @property
    def away(self) -> int:
        """Code in the table for why the draft has no heartbeat; 0 = none."""
        return int(self._table.draft["away"][0])

    @property
    def state(self) -> State:
        """State of the draft, by its table and its lock."""
        return state_of(self._table, held=rundir.is_held(self._watched))
