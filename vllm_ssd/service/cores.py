"""Which cores of a CPU machine the draft gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CoreSplit:
    """draft: the draft's cores. target: value for ``VLLM_CPU_OMP_THREADS_BIND``, or None where
    the user has set it. shared: target and draft have to share cores."""

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
    """Divide ``available`` cores among ``ranks`` target workers and the draft of one engine, which
    is number ``engine`` of ``engines`` that share them; ``ValueError`` for a malformed list.

    draft_device: cores the user chose for the drafts. bind: the user's thread binding of the
    targets, one list per rank separated by ``|``, or None. By default the draft, which is small,
    takes a quarter of the engine's cores, at least one, and the target the rest; less than a
    quarter where some worker would have to share a core.
    """
    if bind is not None:
        taken = {core for part in bind.split("|") for core in parse_cores(part)}
        left = [core for core in available if core not in taken]
        drafts = parse_cores(draft_device) if draft_device is not None else left
        draft = _share(drafts, engine, engines) or list(drafts)
        return CoreSplit(draft or list(available), None, not draft or bool(taken & set(draft)))
    if draft_device is not None:
        drafts = parse_cores(draft_device)
        draft = _share(drafts, engine, engines) or drafts
        own = list(available)
        left = _share([core for core in available if core not in drafts], engine, engines)
    else:
        own = _share(available, engine, engines) or list(available)
        spare = min(len(own) // 4, len(own) - ranks)
        draft = own[-max(1, spare) :]
        left = [core for core in own if core not in draft]
    shared = not left or len(available) < engines
    left = left or own
    parts = []
    for rank in range(ranks):
        mine = _share(left, rank, ranks)
        shared |= not mine
        parts.append(",".join(map(str, mine or left)))
    # One copy per engine, as vLLM indexes the parts by all ranks of all engines.
    return CoreSplit(draft, "|".join(parts * engines), shared)


def _share(cores: Sequence[int], number: int, of: int) -> list[int]:
    """Part ``number`` of ``of`` parts of about the same size; empty if there are too few cores."""
    return list(cores[number * len(cores) // of : (number + 1) * len(cores) // of])


def available_cores() -> list[int]:
    """Cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def pin_to(cores: Sequence[int]) -> None:
    """Run this process, and threads it starts from now on, on these cores only."""
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
