"""Figures from the counters of a running engine, such as hit rate and acceptance length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_ssd.metrics.catalog import WORK
from vllm_ssd.table import SpeculationTable

_GAUGES = (
    *("started_s", "heartbeat", "pid", "live", "blocks", "free_blocks", "joined", "away"),
    "link_us",
)


def snapshot(table: SpeculationTable) -> dict[str, Any]:
    """Return all counters and gauges of a table: name in ``TableShape`` -> int or list of ints."""
    parts = table.target[0], table.draft[0]
    return {name: part[name].tolist() for part in parts for name in part.dtype.names or ()}


def subtract(later: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts between two snapshots. Gauges keep their later value."""
    return {
        name: value if name in _GAUGES else np.subtract(value, earlier[name]).tolist()
        for name, value in later.items()
    }


def total(counts: Sequence[int]) -> float:
    """Return the sum of values of which ``counts[n]`` are n."""
    return float(sum(value * count for value, count in enumerate(counts)))


def rates(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return derived figures. hit, miss, late: shares of rounds. tokens_per_round: 1 + mean
    accepted length. acceptance: shares of verifications that accepted at least 1, 2, .. k draft
    tokens. wait_ms: milliseconds that all steps waited, divided by the rounds. accepted_share: of
    the draft's verified tokens. prefill_ms, glue_ms, branch_ms: milliseconds for one of them."""
    rounds = max(counters["rounds"], 1)
    accepted = counters["accepted"]
    verified = max(sum(accepted), 1)
    reached = [sum(accepted[j:]) / verified for j in range(1, len(accepted))]
    return {
        "hit": counters["hits"] / rounds,
        "miss": counters["misses"] / rounds,
        "late": counters["late"] / rounds,
        "tokens_per_round": 1 + sum(reached),
        "acceptance": reached,
        "wait_ms": counters["wait_us"] / 1000 / rounds,
        "ready_per_round": total(counters["ready"]) / max(sum(counters["ready"]), 1),
        "drafts_per_round": counters["drafts"] / rounds,
        "branches_per_round": counters["branches"] / max(counters["drafted_ahead"], 1),
        "accepted_share": sum(counters["taken"]) / max(sum(counters["verified"]), 1),
        **{f"{k}_ms": counters[f"{k}_us"] / 1000 / max(counters[k], 1) for k in WORK},
    }


def describe(counters: Mapping[str, Any]) -> str:
    """One line in the style of vLLM's speculative decoding metrics."""
    derived = rates(counters)
    acceptance = ", ".join(f"{share:.3f}" for share in derived["acceptance"])
    return (
        f"Rounds: {counters['rounds']}, Off: {counters['off']}, "
        f"Hit rate: {derived['hit']:.1%}, "
        f"Miss rate: {derived['miss']:.1%}, Late rate: {derived['late']:.1%}, "
        f"Timeouts: {counters['timeouts']}, "
        f"Mean acceptance length: {derived['tokens_per_round']:.2f}, "
        f"Per-position acceptance rate: {acceptance}, "
        f"Wait: {derived['wait_ms']:.2f} ms/round"
    )
