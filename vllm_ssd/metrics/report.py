"""The figures of running engines that ``vllm-ssd stats`` shows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_ssd.metrics.figures import rates, snapshot, subtract, total
from vllm_ssd.protocol import SpeculationTable, TableOwner
from vllm_ssd.protocol.heartbeat import heartbeat_age_s
from vllm_ssd.protocol.service_state import State, state_of

# Kind of the draft's work -> label of its row.
_WORK = {
    "prefill": "prompt tokens read",
    "glue": "glue: predicts outcomes",
    "branch": "steps over branches",
}
_STATES = {
    State.LOADING: "loading",
    State.SERVING: "serves",
    State.ASLEEP: "asleep",
    State.LOST: "lost, being restarted",
    State.GONE: "lost for good",
}


@dataclass(frozen=True)
class EngineReport:
    """The contents of the table of one engine, or of a draft service. counted: its counters, since
    the engine's start or an earlier report. elapsed_s: seconds since then. looked_at: monotonic
    seconds. heartbeat_age_s: seconds; None where no heartbeat is expected."""

    path: Path
    owner: TableOwner
    counted: Mapping[str, Any]
    state: State
    heartbeat_age_s: float | None
    elapsed_s: float
    looked_at: float

    @classmethod
    def read(cls, path: Path, table: SpeculationTable) -> EngineReport:
        counted = snapshot(table)
        return cls(
            path,
            table.owner,
            counted,
            state_of(table),
            heartbeat_age_s(table),
            time.time() - counted["started_s"],
            time.monotonic(),
        )

    def since(self, earlier: EngineReport) -> EngineReport:
        """Return a report on the time since ``earlier``, a report on this engine."""
        return replace(
            self,
            counted=subtract(self.counted, earlier.counted),
            elapsed_s=self.looked_at - earlier.looked_at,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs: numbers with units in their names, and shares 0..1."""
        return {
            "engine": self.owner.engine,
            "model": self.owner.model,
            "draft_server": self.owner.named_by_user or None,
            "pid": self.owner.pid,
            "table": str(self.path),
            "draft_serves": self.serves,
            "draft_heartbeat_age_s": self.heartbeat_age_s,
            "draft_kv_cache_usage": self._kv_usage(),
            "draft_busy": self._busy(),
            "rates": rates(self.counted),
            "counters": dict(self.counted),
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the report for people: labels, and values with their units."""
        counted, of_rounds = self.counted, rates(self.counted)
        rounds = max(counted["rounds"], 1)
        owner = self.owner
        whose = f" of {owner.named_by_user}" if owner.named_by_user else ""
        away = self.heartbeat_age_s is None
        yield "target", owner.model or "of each engine"
        yield "draft", _STATES[self.state] if away or self.serves else "silent"
        yield "  process", f"{counted['pid']}{whose}"
        yield "  last heartbeat", "none" if away else f"{self.heartbeat_age_s:.1f} s ago"
        yield "  engines that share it", str(counted["joined"])
        link_us = counted["link_us"]
        yield "  network round trip", f"{link_us / 1000:.2f} ms" if link_us else "none: same node"
        yield "  restarts", str(counted["restarts"])
        yield "  requests it drafts for", "none" if away else str(counted["live"])
        yield "  KV cache in use", "none" if away else f"{self._kv_usage():.1%}"
        yield "  busy", f"{self._busy():.0%} of the time"
        for kind, label in _WORK.items():
            done = counted[kind]
            mean_ms = counted[f"{kind}_us"] / max(done, 1) / 1000
            yield f"  {label}", f"{done}, {mean_ms:.2f} ms each"
        branches = counted["branches"] / max(counted["drafted_ahead"], 1)
        yield "  branches", f"{branches:.1f} per round"
        yield "rounds", str(counted["rounds"])
        yield "  hit: drafts ready at once", f"{of_rounds['hit']:.1%} of rounds"
        yield "  miss: not predicted", f"{of_rounds['miss']:.1%} of rounds"
        yield "  late: drafts not ready", f"{of_rounds['late']:.1%} of rounds"
        yield "  off: plain was faster", f"{counted['off']} rounds"
        ready = total(counted["ready"]) / max(sum(counted["ready"]), 1)
        yield "  draft tokens ready at once", f"{ready:.2f} per round"
        yield "  wait for drafts", f"{of_rounds['wait_ms']:.2f} ms per round"
        yield "  waits that timed out", f"{counted['timeouts']} requests"
        yield "  draft tokens given", f"{counted['drafts'] / rounds:.2f} per round"
        accepted = sum(counted["taken"]) / max(sum(counted["verified"]), 1)
        yield "  draft tokens accepted", f"{accepted:.1%} of verified"
        yield "  tokens generated", f"{of_rounds['tokens_per_round']:.2f} per round"

    @property
    def title(self) -> str:
        """The heading of this report's column. The process tells engines of two servers apart."""
        owner = self.owner
        is_service = owner.draft_server and not owner.model
        name = f"draft server {owner.draft_server}" if is_service else f"engine {owner.engine}"
        return f"{name}\nprocess {owner.pid}"

    @property
    def serves(self) -> bool:
        """Whether the draft serves."""
        return self.state is State.SERVING

    def _kv_usage(self) -> float:
        blocks: int = self.counted["blocks"]
        return 1 - self.counted["free_blocks"] / blocks if blocks else 0.0

    def _busy(self) -> float:
        """Return the share of the time in which the draft's device works."""
        busy_us = sum(self.counted[f"{kind}_us"] for kind in _WORK)
        return float(busy_us) / 1e6 / max(self.elapsed_s, 1e-6)


def as_table(reports: Sequence[EngineReport]) -> Table:
    """Return a table with one column per report."""
    table = Table()
    table.add_column(no_wrap=True)
    for report in reports:
        table.add_column(report.title, justify="right", overflow="fold")
    for cells in zip(*(report.rows() for report in reports)):
        table.add_row(cells[0][0], *(value for _, value in cells))
    return table
