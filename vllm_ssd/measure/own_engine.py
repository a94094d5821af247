"""Which of this user's running engines is one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from vllm_ssd.service import rundir


def run_dir_of(processes: Sequence[psutil.Process]) -> Path | None:
    """The run directory of the engine that has one of these processes for its core; None if it
    does not use method ssd. Other engines may be running under the same user."""
    held = {file.path for process in processes for file in process.open_files()}
    own = [d for d in rundir.living() if any(path.startswith(f"{d}/") for path in held)]
    return own[0] if own else None
