"""What other programs take of the demo's cores: where they take much, its figures mean little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CoreTimes:
    """Seconds. at: on the clock; busy: that the cores worked; stolen: that the hypervisor gave
    others; own: that the demo's processes had."""

    at: float
    busy: float
    stolen: float
    own: float


def look(cores: Sequence[int], processes: Callable[[], Sequence[psutil.Process]]) -> CoreTimes:
    """The times up to now. processes: of the demo."""
    busy = stolen = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name.removeprefix("cpu") in map(str, cores):
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counts[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    own = sum(map(_seconds, processes()))
    return CoreTimes(time.monotonic(), busy / _TICKS_A_SECOND, stolen / _TICKS_A_SECOND, own)


def taken(earlier: CoreTimes, later: CoreTimes, cores: int) -> float:
    """The share of the cores' time that others had in between, 0..1."""
    others = later.busy - earlier.busy - (later.own - earlier.own)
    share = (others + later.stolen - earlier.stolen) / (cores * (later.at - earlier.at))
    return min(max(share, 0.0), 1.0)  # clocks of processes and cores differ by a tick


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
