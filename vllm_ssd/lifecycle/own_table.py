"""Makes and finds the speculation table of an engine: its shape, its owner and its files."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from vllm_ssd.lifecycle.placement import engine_index
from vllm_ssd.protocol import SpeculationTable, TableOwner, TableShape, rundir

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def table_shape(vllm_config: VllmConfig) -> TableShape:
    """Shape of the table of an engine with this config."""
    config: Any = vllm_config.speculative_config
    return TableShape(
        slots=vllm_config.scheduler_config.max_num_seqs,
        k=config.k,
        branches=max(config.max_branches, 1),
        top_m=config.top_m,
    )


def table_owner(vllm_config: VllmConfig) -> TableOwner:
    """Owner record that names this process as the table's owner."""
    return TableOwner(
        model=vllm_config.model_config.served_model_name,
        engine=vllm_config.parallel_config.data_parallel_index,
        pid=os.getpid(),
        draft_server=draft_name(vllm_config),
    )


def draft_name(vllm_config: VllmConfig) -> str:
    """Name of the draft service that an engine with this config joins."""
    config: Any = vllm_config.speculative_config
    if config.draft_server is not None or config.share_draft:
        return str(config.draft_server or config.own_draft)
    return f"{config.own_draft}/{engine_index(vllm_config.parallel_config)}"


def engines_of(draft_server: str) -> list[TableOwner]:
    """Owners of this user's running engines that use the service with this name, including those
    for which it does not draft now."""
    found = []
    for path in rundir.tables():
        try:
            owner = SpeculationTable.open(path, writable=False).owner
        except (FileNotFoundError, PermissionError, ValueError):
            continue  # the engine is stopping, or has another version of this package
        if owner.draft_server == draft_server and owner.model:
            found.append(owner)
    return found


class OwnFiles:
    """A run directory and its table, made by this process and held until ``remove``. First removes
    the files that killed engines have left. locks: file descriptors that hold directory and
    table."""

    def __init__(self, shape: TableShape, owner: TableOwner):
        """Raises ``OSError`` if there is no room in the temporary folder, and ``RuntimeError`` with
        a sentence if there is none in shared memory."""
        rundir.sweep()
        self.run_dir, self.locks = rundir.create()
        try:
            self.table = SpeculationTable.create(rundir.table_path(self.run_dir), shape, owner)
            self.table.target["started_s"] = int(time.time())  # a target's worker sets it again
            self.locks.append(rundir.hold_table(self.run_dir))
        except OSError as error:
            self.remove()
            size = shape.size / 2**20
            raise RuntimeError(
                f"SSD: no room for the speculation table ({size:.1f} MiB of shared memory: "
                f"{error}): free some, or in a container raise --shm-size"
            ) from error

    def remove(self) -> None:
        """Remove the directory and the table; a second call does nothing."""
        if self.locks:
            rundir.remove(self.run_dir)
        self.let_go()

    def let_go(self) -> None:
        """Release the locks and leave the files to the other processes that hold them."""
        while self.locks:
            os.close(self.locks.pop())
