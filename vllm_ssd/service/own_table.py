"""Makes and finds the speculation table of an engine: its shape, its owner and its files."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.service.placement import engine_index
from vllm_ssd.table import SpeculationTable, TableOwner, TableShape, rundir

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


class NoRoom(RuntimeError):
    """Files of an engine or a draft cannot be made. The text is a sentence."""


@contextlib.contextmanager
def in_a_sentence(problem: str, fix: str) -> Iterator[None]:
    """Raise ``NoRoom`` in place of ``OSError``."""
    try:
        yield
    except OSError as error:
        raise NoRoom(f"SSD: {problem} ({error.strerror or error}): {fix}") from error


FREE_FOLDER = "free some space in the temporary folder, or set TMPDIR to another one"


def open_table(vllm_config: VllmConfig, writable: bool = True) -> SpeculationTable:
    """Open the table of this process's engine. Errors: ``SpeculationTable.open``'s."""
    config: Any = vllm_config.speculative_config
    if not config.run_dir:  # there was no room for its files
        return SpeculationTable.without_draft(table_shape(vllm_config))
    return SpeculationTable.open(rundir.table_path(Path(config.run_dir)), writable)


class OwnFiles:
    """A run directory and its table, made by this process and held until ``remove``. First removes
    the files that killed engines have left. locks: file descriptors that hold directory and
    table."""

    def __init__(self, shape: TableShape, owner: TableOwner):
        """Raises ``NoRoom``."""
        with in_a_sentence("no room for the run directory", FREE_FOLDER):
            rundir.sweep()
            self.run_dir, self.locks = rundir.create()
        path = rundir.new_table_path(self.run_dir)
        problem = f"no room for the speculation table of {shape.size / 2**20:.1f} MiB"
        try:
            with in_a_sentence(problem, "free shared memory, or in a container raise --shm-size"):
                self.table = SpeculationTable.create(path, shape, owner)
                self.locks.append(rundir.hold_table(self.run_dir))
        except NoRoom:
            self.remove()
            raise
        self.table.target["started_s"] = int(time.time())  # a target's worker sets it again

    def remove(self) -> None:
        """Remove the directory and the table; a second call does nothing."""
        if self.locks:
            rundir.remove(self.run_dir)
        self.let_go()

    def let_go(self) -> None:
        """Release the locks and leave the files to the other processes that hold them."""
        while self.locks:
            os.close(self.locks.pop())
