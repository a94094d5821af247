"""Whether a process still runs."""

from __future__ import annotations

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether nothing is left of it but, perhaps, an entry that its parent has yet to read."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
