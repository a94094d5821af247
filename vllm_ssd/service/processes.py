"""Whether a process still runs."""

from __future__ import annotations

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended; a zombie, whose parent has yet to wait for it, has."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
