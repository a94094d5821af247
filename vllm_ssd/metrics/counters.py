"""The target's counters in the speculation table, and the log lines that report them."""

from __future__ import annotations

import time

from vllm_ssd.log import get_logger
from vllm_ssd.metrics.figures import describe, snapshot, subtract
from vllm_ssd.table import SpeculationTable
from vllm_ssd.table.predictions import LookupResult
from vllm_ssd.table.schema import SHORTEST_WAIT_US, WAIT_COUNTERS

logger = get_logger(__name__)

LOG_INTERVAL_S = 10.0
# Verified first draft tokens between two checks of their acceptance: so many that chance alone does
# not halve it.
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
        """Count a verification of a request. accepted: proposed tokens that the target accepted,
        0..k. drafts: how many of the proposed tokens came from the draft."""
        self._counters["accepted"][accepted] += 1
        self._counters["verified"][:drafts] += 1
        self._counters["taken"][: min(accepted, drafts)] += 1

    def looked_up(self, first: LookupResult, drafts: int) -> None:
        """Count a round whose outcome was looked up. first: the first lookup's result, before any
        wait. drafts: draft tokens that the request got after the last lookup, 0..k."""
        counters = self._counters
        counters["rounds"] += 1
        counters["drafts"] += drafts
        counters["ready"][len(first.tokens)] += 1
        result = "late"
        if first.predicted and first.tokens:
            result = "hits"
        elif first.missed:
            result = "misses"
        counters[result] += 1

    def went_without(self, rounds: int) -> None:
        """Count rounds without draft tokens, which were measured to be faster."""
        self._counters["off"] += rounds

    def waited(self, seconds: float, timeouts: int) -> None:
        """Count a step that waited for the draft. timeouts: requests that still have too few draft
        tokens."""
        wait_us = int(seconds * 1e6)
        doublings = (max(wait_us - 1, 0) // SHORTEST_WAIT_US).bit_length()
        self._counters["wait_us"] += wait_us
        self._counters["waits"][min(doublings, WAIT_COUNTERS - 1)] += 1
        self._counters["timeouts"] += timeouts

    def log(self) -> None:
        """Log what was counted since the last line, if that is ``LOG_INTERVAL_S`` seconds old."""
        now = time.monotonic()
        if now < self._next_log:
            return
        self._next_log = now + LOG_INTERVAL_S
        current = snapshot(self._table)
        self._acceptance.check(current["verified"][0], current["taken"][0])
        news = subtract(current, self._logged)
        if news["rounds"] or news["off"]:
            logger.info("SSD metrics: %s", describe(news))
        self._logged = current


class _Acceptance:
    """Watches the acceptance of first draft tokens; warns once if it has halved since the start.
    A first draft token follows a bonus token. Its acceptance does not depend on how many draft
    tokens are verified."""

    def __init__(self) -> None:
        self._verified = self._taken = 0  # at the last check
        self._usual: float | None = None
        self._said = False

    def check(self, verified: int, taken: int) -> None:
        """Check the acceptance. verified, taken: first draft tokens verified and accepted since the
        start."""
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
                "was %.0f%%: if its weights have changed, give the draft new ones with "
                'collective_rpc("reload_draft", args=(path,))',
                100 * share,
                100 * self._usual,
            )
