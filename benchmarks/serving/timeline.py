"""What target and draft do while one request is answered, seen from outside by their counters."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.running import counters
from benchmarks.serving.records import Moment, Work

_PAUSE_S = 2e-4  # between two looks: less than any piece of work takes
_DRAFTS: tuple[Work, ...] = ("prefill", "fallback", "glue", "branch")


def record(run_dir: Path, ask: Callable[[], None]) -> list[Moment]:
    """What the engine with this run directory does while ``ask`` runs, which has it answer one
    request. The times are those at which counters were seen to change, and so are late by
    up to half a millisecond."""
    looks: list[tuple[float, dict[str, Any]]] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(_PAUSE_S):
            looks.append((time.perf_counter() * 1000, counters(run_dir)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        ask()
    finally:
        done.set()
        thread.join()
    return moments(looks)


def moments(looks: Sequence[tuple[float, Mapping[str, Any]]]) -> list[Moment]:
    """Pieces of work out of counters. looks: (milliseconds, `vllm_ssd.metrics.snapshot`) in the
    order of time."""
    found: list[Moment] = []
    last_round: float | None = None
    for (_, earlier), (now, later) in pairwise(looks):
        found += _of_draft(now, earlier, later)
        if later["rounds"] > earlier["rounds"]:
            # A wait is over before its outcome is counted, in the same step.
            waited = (later["wait_us"] - earlier["wait_us"]) / 1000
            if last_round is not None:
                kinds = {"hit": "hits", "miss": "misses", "late": "late"}
                ended = [kind for kind, name in kinds.items() if later[name] > earlier[name]]
                found.append(Moment("verify", last_round, now - waited, ended[0] if ended else ""))
            if waited:
                found.append(Moment("wait", now - waited, now))
            last_round = now
    return found


def _of_draft(now: float, earlier: Mapping[str, Any], later: Mapping[str, Any]) -> Iterator[Moment]:
    """Pieces that ended since the earlier look; of several, they are said to be as long as each
    other."""
    end = now
    for work in reversed(_DRAFTS):
        count = later[work] - earlier[work] if work != "prefill" else 1
        spent = (later[f"{work}_us"] - earlier[f"{work}_us"]) / 1000
        for _ in range(count if spent else 0):
            yield Moment(work, end - spent / count, end)
            end -= spent / count
