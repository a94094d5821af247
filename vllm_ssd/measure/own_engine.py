"""Which of this user's running engines is one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from vllm_ssd.service import rundir
from vllm_ssd.table import SpeculationTable


def run_dir_of(processes: Sequence[psutil.Process]) -> Path | None:
    """The run directory of the engine that has one of these processes for its core; None if it
    does not use method ssd. Other engines may be running under the same user, and a relay of one's
    own has such a directory, too."""
    held = {file.path for process in processes for file in process.open_files()}
    own = [d for d in rundir.living() if any(path.startswith(f"{d}/") for path in held)]
    return next((d for d in own if _is_of_engine(d)), None)


def _is_of_engine(run_dir: Path) -> bool:
    try:
        table = SpeculationTable.open(rundir.table_path(run_dir), writable=False)
    except FileNotFoundError:
        return False  # it is being made, or put away
    return bool(table.owner.model)
