"""Counters of a running engine, kept in the table's header, and how they are shown."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_ssd.log import get_logger
from vllm_ssd.table import SpeculationTable
from vllm_ssd.table.predictions import LookupResult

logger = get_logger(__name__)

LOG_INTERVAL_S = 10.0
# First drafts of a round after which their acceptance is looked at: enough that chance does not
# halve it.
_SAMPLE = 1000


class TargetCounters:
    """The target's counters; one log line per ``LOG_INTERVAL_S`` seconds of activity."""

    def __init__(self, table: SpeculationTable):
        self._counters = table.target[0]
        self._counters["started_s"] = int(time.time())
        self._logged = snapshot(table)
        self._table = table
        self._acceptance = _Acceptance()
        self._next_log = time.monotonic() + LOG_INTERVAL_S

    def verified(self, accepted: int, drafts: int) -> None:
        """The target has accepted ``accepted`` proposed tokens of a request, 0..k. drafts: the
        number of proposed ones that were the draft's."""
        self._counters["accepted"][accepted] += 1
        self._counters["verified"][:drafts] += 1
        self._counters["taken"][: min(accepted, drafts)] += 1

    def looked_up(self, first: LookupResult, drafts: int) -> None:
        """A request's outcome was looked up. first: what the first look found, before any wait;
        drafts: the drafts that the request got after the last one, 0..k."""
        counters = self._counters
        counters["rounds"] += 1
        counters["drafts"] += drafts
        if first.predicted and len(first.tokens) >= first.steps:
            counters["hits"] += 1
        elif first.published and not first.predicted:
            counters["misses"] += 1
        else:
            counters["late"] += 1

    def waited(self, seconds: float, timeouts: int) -> None:
        """A step waited for the draft; ``timeouts`` of its requests still have too few drafts."""
        self._counters["wait_us"] += int(seconds * 1e6)
        self._counters["timeouts"] += timeouts

    def log(self) -> None:
        """Log what was counted since the last line, if that is ``LOG_INTERVAL_S`` seconds old."""
        now = time.monotonic()
        if now < self._next_log:
            return
        self._next_log = now + LOG_INTERVAL_S
        current = snapshot(self._table)
        self._acceptance.look(current["verified"][0], current["taken"][0])
        news = subtract(current, self._logged)
        if news["rounds"]:
            logger.info("SSD metrics: %s", describe(news))
        self._logged = current


class _Acceptance:
    """Of the draft's tokens right after a bonus, the share that was accepted: it does not depend on
    how many were verified. Says once if it has halved since the start."""

    def __init__(self) -> None:
        self._verified = self._taken = 0  # at the last look
        self._usual: float | None = None
        self._said = False

    def look(self, verified: int, taken: int) -> None:
        """verified, taken: of these drafts, the numbers verified and accepted since the start."""
        if self._said or verified - self._verified < _SAMPLE:
            return
        share = (taken - self._taken) / (verified - self._verified)
        self._verified, self._taken = verified, taken
        if self._usual is None:
            self._usual = share
        elif share < self._usual / 2:
            self._said = True
            logger.warning(
                "SSD: the target accepts %.0f%% of the draft's first tokens, and at the start it "
                "was %.0f%%: if its weights have changed, have the draft take others with "
                'collective_rpc("reload_draft", args=(path,))',
                100 * share,
                100 * self._usual,
            )


def snapshot(table: SpeculationTable) -> dict[str, Any]:
    """All counters of a table: name -> int, ``accepted`` -> list of k + 1 ints."""
    values: dict[str, Any] = {}
    for part in (table.target[0], table.draft[0]):
        for name in part.dtype.names or ():
            value = part[name]
            values[name] = value.tolist() if isinstance(value, np.ndarray) else int(value)
    return values


def subtract(later: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """What was counted between two snapshots; gauges keep their later value."""
    gauges = ("started_s", "heartbeat", "pid", "live", "free_blocks")
    difference: dict[str, Any] = {}
    for name, value in later.items():
        if name in gauges:
            difference[name] = value
        elif isinstance(value, list):
            difference[name] = (np.array(value) - np.array(earlier[name])).tolist()
        else:
            difference[name] = value - earlier[name]
    return difference


def rates(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Derived figures. hit, miss, late: shares of rounds. tokens_per_round: 1 + mean of accepted
    drafts. acceptance: shares of verifications that accepted at least 1, 2, .. k drafts. wait_ms:
    milliseconds that all steps waited, divided by the rounds."""
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
    }


def describe(counters: Mapping[str, Any]) -> str:
    """One line in the style of vLLM's speculative decoding metrics."""
    derived = rates(counters)
    acceptance = ", ".join(f"{share:.3f}" for share in derived["acceptance"])
    return (
        f"Rounds: {counters['rounds']}, Hit rate: {derived['hit']:.1%}, "
        f"Miss rate: {derived['miss']:.1%}, Late rate: {derived['late']:.1%}, "
        f"Timeouts: {counters['timeouts']}, "
        f"Mean acceptance length: {derived['tokens_per_round']:.2f}, "
        f"Per-position acceptance rate: {acceptance}, "
        f"Wait: {derived['wait_ms']:.2f} ms/round"
    )
