"""What engines count of their own speculation, read before and after."""

from pathlib import Path
from typing import Any, Protocol

from benchmarks.common.records import OURS, Kind, Speculation
from vllm_ssd.measure.closed_loop import Counters
from vllm_ssd.metrics import rates, snapshot, subtract
from vllm_ssd.service import rundir
from vllm_ssd.table import SpeculationTable

_PREFIX = "vllm:spec_decode_num_"


class Counting(Protocol):
    """An engine's counters."""

    def read(self) -> Counters:
        """All counters at this moment."""

    def between(self, before: Counters, after: Counters) -> Speculation | None:
        """What happened between two readings; None for an engine that does not speculate."""


def counting(llm: Any, kind: Kind) -> Counting:
    """The counters of an engine."""
    if kind in OURS:
        return _Ours(table_of(llm))
    return _Plain() if kind == "ar" else _VllmsOwn(llm)


def table_of(llm: Any) -> SpeculationTable:
    """The table of an engine of method ssd, to be read. It must have been started in an environment
    that lets functions travel to vLLM's workers."""
    run_dir, *_ = llm.collective_rpc(_run_dir)
    return SpeculationTable.open(rundir.table_path(Path(run_dir)), writable=False)


def _run_dir(worker: Any) -> str:
    run_dir: str = worker.vllm_config.speculative_config.run_dir
    return run_dir


class _Plain:
    def read(self) -> Counters:
        return {}

    def between(self, before: Counters, after: Counters) -> Speculation | None:
        return None


class _VllmsOwn:
    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def read(self) -> Counters:
        found = {}
        for metric in self._llm.get_metrics():
            if metric.name == f"{_PREFIX}drafts":
                found["rounds"] = metric.value
            elif metric.name == f"{_PREFIX}accepted_tokens_per_pos":
                found["accepted"] = list(metric.values)
        return found

    def between(self, before: Counters, after: Counters) -> Speculation | None:
        rounds = max(after["rounds"] - before["rounds"], 1)
        accepted = zip(after["accepted"], before["accepted"], strict=True)
        return Speculation([(later - earlier) / rounds for later, earlier in accepted])


class _Ours:
    def __init__(self, table: SpeculationTable) -> None:
        self._table = table

    def read(self) -> Counters:
        return snapshot(self._table)

    def between(self, before: Counters, after: Counters) -> Speculation | None:
        counted = subtract(after, before)
        derived = rates(counted)
        return Speculation(
            acceptance=derived["acceptance"],
            hit=derived["hit"],
            miss=derived["miss"],
            late=derived["late"],
            wait_ms=derived["wait_ms"],
            glue_ms=counted["glue_us"] / 1000 / max(counted["glue"], 1),
            step_ms=counted["branch_us"] / 1000 / max(counted["branch"], 1),
        )
