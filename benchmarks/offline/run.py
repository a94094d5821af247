"""Measures sides whose engines start at the same time."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common.records import Result, Side
from benchmarks.offline.process import run_side
from benchmarks.offline.turns import Turns
from benchmarks.standin.folders import say


def run_together(sides: Sequence[Side], logs: Path, limit_s: float) -> Iterator[Result]:
    """Start all engines at once and measure them one after the other: their results in the order of
    `sides`. Their logs go to the folder `logs`. A side has failed after `limit_s` seconds."""
    turns = Turns(len(sides))

    def run(side: Side) -> Result:
        log = logs / f"{side.name.replace(' ', '-')}.log"
        return run_side(side, log, limit_s, say, turns)

    with ThreadPoolExecutor(len(sides)) as threads:
        yield from threads.map(run, sides)
