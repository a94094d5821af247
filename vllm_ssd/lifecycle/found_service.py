"""A draft of a service, found by its run directory, as engines that may join it see it."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from vllm_ssd.protocol import SpeculationTable, rundir
from vllm_ssd.protocol.service_state import State, state_of


class Service:
    """What its own table and its lock tell."""

    def __init__(self, run_dir: Path):
        """Raises as ``rundir.watch`` and ``SpeculationTable.open``."""
        self.run_dir = run_dir
        self._table = SpeculationTable.open(rundir.table_path(run_dir), writable=False)
        self._watched = rundir.watch(run_dir)
        # Also where an exception forgets it: else each try would leave an open file.
        self.close = weakref.finalize(self, os.close, self._watched)

    @property
    def pid(self) -> int:
        """Of its draft's process."""
        return int(self._table.draft["pid"][0])

    @property
    def engines(self) -> int:
        """For which it drafts."""
        return int(self._table.draft["joined"][0])

    @property
    def away(self) -> int:
        """Why it has no heartbeat, as the table knows it."""
        return int(self._table.draft["away"][0])

    @property
    def has_ended(self) -> bool:
        return not rundir.is_held(self._watched)

    @property
    def state(self) -> State:
        """What its table says."""
        return state_of(self._table, held=not self.has_ended)
