"""Cores that a process may have, and how its threads get them."""

from __future__ import annotations

import os

from vllm_ssd.log import get_logger

logger = get_logger(__name__)

_MOST = 2**16  # more cores than any host has


def parse_cores(text: str) -> list[int]:
    """``"2-3,6"`` -> [2, 3, 6]; ``ValueError`` with a sentence otherwise."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = first.isdecimal() and (last.isdecimal() or not dash)
        if not numbers or not int(first) <= int(last or first) < _MOST:
            raise ValueError(f"'{text}' is not a list of cores: write for example \"2-3,6\"")
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)


def available_cores() -> list[int]:
    """Cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def take_niceness_of_others() -> None:
    """Set niceness 0 for this thread and all that it starts, if this user may. With the niceness of
    Ray's workers, a draft would hardly load next to busy processes."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness <= 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        logger.warning(
            "SSD: the draft has niceness %d, as Ray's workers have, and this user may not lower "
            "it: if other programs keep all cores of its node busy, start that node with "
            "RAY_worker_niceness=0",
            niceness,
        )
