"""Divides the cores of a CPU machine between draft and targets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_ssd.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class CoreSplit:
    """Cores of draft and target. draft: the draft's cores. target: value for
    ``VLLM_CPU_OMP_THREADS_BIND``, None if the user has set it. shared: whether both share some."""

    draft: list[int]
    target: str | None
    shared: bool


def parse_cores(text: str) -> list[int]:
    """``"2-3,6"`` -> [2, 3, 6]; ``ValueError`` with a sentence otherwise."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"'{text}' is not a list of cores: write for example \"2-3,6\"")
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)


def split_cores(
    available: Sequence[int],
    ranks: int,
    draft_device: str | None,
    bind: str | None,
    engine: int = 0,
    engines: int = 1,
) -> CoreSplit:
    """Divide the ``available`` cores between the draft and the targets' workers: ``ranks`` workers
    in each of ``engines`` engines. Returns the split for engine number ``engine``. Raises
    ``ValueError`` for a malformed list.

    draft_device: the user's cores for the draft that all engines share, or one list for each
    engine's draft, separated by ``|``. bind: the user's thread binding of the targets, one list
    per rank, separated by ``|``, or None. By default the draft takes a quarter of the cores, at
    least one. It takes fewer if a target worker would otherwise have to share a core.
    """
    bound = [] if bind is None else [parse_cores(part) for part in bind.split("|")]
    if draft_device is not None:
        drafts = [parse_cores(part) for part in draft_device.split("|")]
    elif bind is None:
        spare = min(len(available) // 4, len(available) - ranks * engines)
        drafts = [list(available[-max(1, spare) :])]
    else:
        drafts = [_without(available, bound)]
    draft = drafts[engine % len(drafts)] or list(available)
    if bind is not None:
        return CoreSplit(draft, None, any(core in part for part in bound for core in draft))
    free = _without(available, drafts)
    left = _share(free, engine, engines) or free or list(available)
    shares = [_share(left, rank, ranks) for rank in range(ranks)]
    shared = not free or len(free) < engines or not all(shares)
    parts = [",".join(map(str, mine or left)) for mine in shares]
    # One copy per engine: vLLM indexes the parts by a rank that counts the ranks of all engines.
    return CoreSplit(draft, "|".join(parts * engines), shared)


def _without(cores: Sequence[int], taken: Iterable[Sequence[int]]) -> list[int]:
    """The cores that are in none of the ``taken`` lists."""
    gone = {core for part in taken for core in part}
    return [core for core in cores if core not in gone]


def _share(cores: Sequence[int], number: int, of: int) -> list[int]:
    """Part ``number`` of ``of`` parts of about the same size; empty if there are too few cores."""
    return list(cores[number * len(cores) // of : (number + 1) * len(cores) // of])


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
