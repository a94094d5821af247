"""Which of this user's running engines is one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from vllm_ssd.service import rundir
from vllm_ssd.table import SpeculationTable


def run_dir_of(processes: Sequence[psutil.Process]) -> Path | None:
    """The run directory of the engine that has one of these processes for its core; None if it
    does not use method ssd. Other engines may be running under the same user, and an engine may
    have started the draft that it shares or a relay to one, which have run directories, too."""
    held = {file.path for process in processes for file in process.open_files()}
    for run_dir in rundir.living():
        if any(path.startswith(f"{run_dir}/") for path in held) and _is_engines(run_dir):
            return run_dir
    return None


def _is_engines(run_dir: Path) -> bool:
    try:
        table = SpeculationTable.open(rundir.table_path(run_dir), writable=False)
    except FileNotFoundError:
        return False  # it starts or ends right now
    return bool(table.owner.model)
