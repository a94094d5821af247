"""What an engine takes and does, every few seconds; and the deaths of its draft."""

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.common.running import processes_of
from benchmarks.common.server import Server
from vllm_ssd.metrics import snapshot
from vllm_ssd.table import SpeculationTable, rundir

STOPPED_S = 10.0


class Sample(msgspec.Struct, frozen=True):
    """One look. at: seconds since the load began. tokens: that clients had got by then; the
    engine's rounds, hits, misses and late ones, all since its start. MiB of resident memory: of the
    server and its children, of the draft server, of its keeper and Ray; pages that processes share
    count for each. gpu_mib: of the visible GPUs, None without. shared_files: in shared memory."""

    at: float
    tokens: int
    target_mib: float
    draft_mib: float
    ray_mib: float
    gpu_mib: float | None
    open_files: int
    shared_files: int
    rounds: int
    hits: int
    misses: int
    late: int


class Watch:
    """Looks at one server with method ssd. service_dirs: run directories of the drafts that it
    shares; empty if it has its own. seen: every process that the server and its drafts ever had."""

    def __init__(self, server: Server, run_dir: Path, service_dirs: Sequence[Path] = ()):
        self.run_dir = run_dir
        self._dirs = (run_dir, *service_dirs)
        self.seen: dict[int, psutil.Process] = {}
        self._server = server
        # Opened once, lest the figures go when the engine does.
        self._table = SpeculationTable.open(rundir.table_path(run_dir), writable=False)
        self._began = time.monotonic()

    def counters(self) -> dict[str, Any]:
        """What the engine has counted."""
        return snapshot(self._table)

    def helpers(self) -> list[psutil.Process]:
        """Draft servers, their keepers and Rays."""
        found = [process for run_dir in self._dirs for process in processes_of(run_dir)]
        return list({process.pid: process for process in found}.values())

    def draft(self) -> psutil.Process | None:
        """The draft server that the engine has now, if that runs."""
        # Its number may be a stranger's by now.
        own = {process.pid: process for process in self.helpers()}
        return own.get(self.counters()["pid"])

    def look(self, tokens: int) -> Sample:
        """The state of things; tokens: that clients have got."""
        target, helpers = self._server.processes(), self.helpers()
        self.seen |= {process.pid: process for process in (*target, *helpers)}
        counted = self.counters()
        draft = [process for process in helpers if process.pid == counted["pid"]]
        ray = [process for process in helpers if process.pid != counted["pid"]]
        shared = rundir.table_path(self.run_dir).parent
        return Sample(
            at=time.monotonic() - self._began,
            tokens=tokens,
            target_mib=_resident_mib(target),
            draft_mib=_resident_mib(draft),
            ray_mib=_resident_mib(ray),
            gpu_mib=_gpu_mib(),
            open_files=sum(_each(psutil.Process.num_fds, (*target, *helpers))),
            shared_files=len(list(shared.glob(f"*{self.run_dir.name}*"))),
            rounds=counted["rounds"],
            hits=counted["hits"],
            misses=counted["misses"],
            late=counted["late"],
        )


class Killer:
    """Now and then kills the draft server, its keeper, or what Ray cannot do without; each of these
    is the end of the draft server. at: when, in seconds since it was made."""

    what = "killed"

    def __init__(self, watch: Watch, every_s: float, rng: random.Random):
        self.at: list[float] = []
        self._watch = watch
        self._every_s = every_s
        self._rng = rng
        self._killed: set[int] = set()
        self._began = time.monotonic()
        self._next = self._pause()

    def look(self) -> None:
        """Do it if it is time, and if the engine has a draft server that has not been killed."""
        now = time.monotonic() - self._began
        if now < self._next:
            return
        draft = self._watch.draft()
        if draft is not None and draft.pid not in self._killed:
            self._harm(draft)
            self.at.append(now)
            self._next = now + self._pause()

    def end(self) -> None:
        """Harm nothing any more."""

    def _harm(self, draft: psutil.Process) -> None:
        self._killed.add(draft.pid)
        keepers, raylets = [], []
        for process in self._watch.helpers():
            with suppress(psutil.NoSuchProcess):  # it ends by itself
                if "vllm_ssd.service.keeper" in process.cmdline():
                    keepers.append(process)
                elif process.name() == "raylet":
                    raylets.append(process)
        self._rng.choice([draft, *keepers[:1], *raylets[:1]]).kill()

    def draft_lives(self) -> bool:
        """Whether the engine has a draft server that has not been killed."""
        draft = self._watch.draft()
        return draft is not None and draft.pid not in self._killed

    def _pause(self) -> float:
        return self._rng.uniform(0.5, 1.5) * self._every_s


class Stopper(Killer):
    """Now and then stops the draft server that the engine has with SIGSTOP, for ``STOPPED_S``
    seconds, as if it hung, and lets it go on. at: when, in seconds since it was made."""

    what = "stopped"
    _stopped: psutil.Process | None = None
    _until = 0.0

    def look(self) -> None:
        """Let the stopped one go on if it is time; then stop one if it is time."""
        if self._stopped is not None and time.monotonic() > self._until:
            self.end()
        if self._stopped is None:
            super().look()

    def end(self) -> None:
        """Let the stopped one go on."""
        if self._stopped is not None and self._stopped.is_running():
            self._stopped.resume()
        self._stopped = None

    def _harm(self, draft: psutil.Process) -> None:
        draft.suspend()
        self._stopped, self._until = draft, time.monotonic() + STOPPED_S


def _each(
    figure: Callable[[psutil.Process], int], processes: Iterable[psutil.Process]
) -> list[int]:
    """The figure of every process that is still there."""
    found = []
    for process in processes:
        try:
            found.append(figure(process))
        except psutil.NoSuchProcess:
            continue
    return found


def _resident_mib(processes: Iterable[psutil.Process]) -> float:
    return sum(_each(lambda process: process.memory_info().rss, processes)) / 2**20


def _gpu_mib() -> float | None:
    """Memory used on all visible GPUs, where their vendor's tool is there to say. `visible_gpus`
    would load torch and take memory of each, at every look."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # One tool takes a list, the other several words.
    of_nvidia = ["-i", visible] if visible else []
    of_amd = ["-d", *visible.split(",")] if visible else []
    told = _told(
        "nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", *of_nvidia
    )
    if told is not None:
        return float(sum(int(line) for line in told.split()))
    told = _told("rocm-smi", "--showmeminfo", "vram", "--csv", *of_amd)
    if told is not None:
        rows = [line.split(",") for line in told.split() if line.startswith("card")]
        return sum(int(row[2]) for row in rows) / 2**20  # device, total bytes, used bytes
    return None


def _told(tool: str, *options: str) -> str | None:
    """What a tool says; None if it is not there or fails."""
    if shutil.which(tool) is None:
        return None
    said = subprocess.run([tool, *options], capture_output=True, text=True)
    return said.stdout if said.returncode == 0 else None
