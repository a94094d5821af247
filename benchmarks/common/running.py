"""Running engines seen from outside: their counters, their processes, what they leave."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from vllm_ssd.metrics import snapshot
from vllm_ssd.service.own_ray import has_ended
from vllm_ssd.table import SpeculationTable, is_own_draft, rundir
from vllm_ssd.table.draft_names import find_all


def counters(run_dir: Path) -> dict[str, Any]:
    """An engine's counters at this moment."""
    return snapshot(SpeculationTable.open(rundir.table_path(run_dir), writable=False))


def run_dir_of(processes: Sequence[psutil.Process]) -> Path | None:
    """The run directory of the engine whose core is one of these processes; None if it does not use
    method ssd."""
    pids = {process.pid for process in processes}
    for run_dir in rundir.living():
        with suppress(OSError, ValueError):  # one that ends, or is of another version
            owner = SpeculationTable.open(rundir.table_path(run_dir), writable=False).owner
            if owner.model and owner.pid in pids:
                return run_dir
    return None


def run_dirs_of(run_dir: Path) -> list[Path]:
    """An engine's run directory, and that of the draft which it has started for itself."""
    name = SpeculationTable.open(rundir.table_path(run_dir), writable=False).owner.draft_server
    drafts = find_all(name) if is_own_draft(name) else []
    return list({run_dir, *(path for path, _ in drafts)})


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """The keeper, Ray's processes and the draft server of an engine, and its end of a bridge."""
    names = [path.name for path in run_dirs_of(run_dir)]
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values(), process.cwd()]
            if any(name in word for word in words for name in names):
                # The draft server writes its title over both; it is a child of Ray's.
                own = [process, *process.children(recursive=True)]
                found |= {each.pid: each for each in own}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return list(found.values())


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    return [process for process in processes if not has_ended(process)]


def leftovers(run_dir: Path, processes: Sequence[psutil.Process]) -> list[str]:
    """What is still there of an engine that should be gone: files, and of ``processes``, which
    were its own, those that still run."""
    paths = [run_dir] if run_dir.exists() else []
    with suppress(FileNotFoundError):
        paths.append(rundir.table_path(run_dir))
    return [str(each) for each in (*paths, *alive(processes))]
