"""The figures of one engine at one time, from its table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_ssd.metrics.catalog import ROWS, WORK
from vllm_ssd.metrics.figures import rates, snapshot, subtract
from vllm_ssd.table import SpeculationTable, TableOwner
from vllm_ssd.table.service_state import State, heartbeat_age_s, state_of

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
    def read(cls, table: SpeculationTable) -> EngineReport:
        counted, age_s = snapshot(table), heartbeat_age_s(table)
        times = time.time() - counted["started_s"], time.monotonic()
        return cls(table.path, table.owner, counted, state_of(table), age_s, *times)

    def since(self, earlier: EngineReport) -> EngineReport:
        """Return a report on the time since ``earlier``, a report on this engine."""
        counted = subtract(self.counted, earlier.counted)
        return replace(self, counted=counted, elapsed_s=self.looked_at - earlier.looked_at)

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

    def values(self) -> dict[str, Any]:
        """Return the values that the catalog names; None: there is none now."""
        counted, of_rounds, owner = self.counted, rates(self.counted), self.owner
        away = self.heartbeat_age_s is None
        link_us = None if away else counted["link_us"] or None
        return {
            **of_rounds,
            **counted,
            "late_share": of_rounds["late"],
            "tokens_per_round": of_rounds["tokens_per_round"] if any(counted["accepted"]) else None,
            "model": owner.model or "of each engine",
            "draft": _STATES[self.state] if away or self.serves else "silent",
            "process": " of ".join(filter(None, (str(counted["pid"]), owner.named_by_user))),
            "up": int(self.serves),
            "age_s": self.heartbeat_age_s,
            "link_s": link_us and link_us / 1e6,
            "link_ms": link_us and link_us / 1e3,
            "requests": None if away else counted["live"],
            "kv_usage": None if away else self._kv_usage(),
            "busy": self._busy(),
            "num_verified": sum(counted["verified"]),
            "num_taken": sum(counted["taken"]),
            **{f"{kind}_s": counted[f"{kind}_us"] / 1e6 for kind in WORK},
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the report for people: labels, and values with their units."""
        values = self.values()
        for row, cell in ROWS.items():
            try:
                yield row, cell.format(**values)
            except TypeError:  # None has no format
                yield row, "none"

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
        blocks = self.counted["blocks"]
        return 1 - self.counted["free_blocks"] / blocks if blocks else 0.0

    def _busy(self) -> float:
        """Return the share of the time in which the draft's device works."""
        busy_us = sum(self.counted[f"{kind}_us"] for kind in WORK)
        return busy_us / 1e6 / max(self.elapsed_s, 1e-6)
