"""Ways to look at engines from outside: their counters, their processes, what they leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from vllm_ssd import rundir
from vllm_ssd.metrics import snapshot
from vllm_ssd.table import SpeculationTable

ENGINE = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8}


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    """The first true value of ``condition``; an assertion naming ``what`` if there is none."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"no {what} within {timeout_s:g} s")


@contextmanager
def engine(model: str, **options: Any) -> Iterator[Any]:
    """An offline ``LLM``, shut down at the end."""
    from vllm import LLM

    llm = LLM(model, **{**ENGINE, "max_model_len": 512, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm


def run_dirs() -> set[Path]:
    """Run directories of the engines that are up."""
    return set(rundir.living())


def counters(run_dir: Path) -> dict[str, Any]:
    """An engine's counters at this moment."""
    return snapshot(SpeculationTable.open(rundir.table_path(run_dir), writable=False))


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """The keeper, Ray's processes and the draft server of an engine."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(run_dir.name in word for word in words):
            found.append(process)
    return found


def leftovers(run_dir: Path, processes: Sequence[psutil.Process]) -> list[str]:
    """What is still there of an engine that should be gone: files, and of ``processes``, which
    were its own, those that still run."""
    alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    paths = [run_dir, rundir.table_path(run_dir)]
    return [str(path) for path in paths if path.exists()] + [str(process) for process in alive]


def greedy(max_tokens: int = 64, **options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def texts(outputs: Sequence[Any]) -> list[tuple[list[int], str | None]]:
    """Token ids and finish reason of each output."""
    return [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in outputs]
