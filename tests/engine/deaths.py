"""A draft seen from outside, and the ways there are for it to die."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.running import alive, processes_of
from tests.engine.load import Load
from vllm_ssd.metrics import snapshot
from vllm_ssd.table import SpeculationTable, rundir


class Draft:
    """The draft of one engine. seen: every process it ever had."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.seen: dict[int, psutil.Process] = {}
        self._table = SpeculationTable.open(rundir.table_path(run_dir))

    def processes(self) -> list[psutil.Process]:
        """All that are there now: the server's, its keeper's and Ray's."""
        found = alive(processes_of(self.run_dir))
        self.seen |= {process.pid: process for process in found}
        return found

    def named(self, name: str) -> list[psutil.Process]:
        """Those with this in their command lines."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                found += [process] if name in " ".join(process.cmdline()) else []
        return found

    def counted(self) -> dict[str, Any]:
        """All counters of the engine."""
        return snapshot(self._table)

    def server(self) -> psutil.Process:
        """The one that served last."""
        return psutil.Process(self.counted()["pid"])

    def silent(self) -> bool:
        """Whether it was lost and none has followed yet."""
        return bool(self.counted()["heartbeat"] == 0)


def without_keeper(draft: Draft) -> None:
    """Who starts a draft again is gone."""
    (keeper,) = draft.named("vllm_ssd.service.keeper")
    keeper.kill()


def out_of_memory(draft: Draft, load: Load) -> None:
    """It gets no more than it has. Texts of other lengths than before need some."""
    server = draft.server()
    server.rlimit(psutil.RLIMIT_AS, (server.memory_info().rss, psutil.RLIM_INFINITY))

    asked = load.ask_another()

    def dead() -> bool:  # it may be back before an answer ends
        nonlocal asked
        if asked.done():
            asked.result()
            asked = load.ask_another()
        return draft.silent()

    load.until("end of the memory", dead)
