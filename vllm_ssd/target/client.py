"""The target's side of a round, shared by every model runner. Runs on TP rank 0 only.

Each step the runner hands over, for every request that sampled, its text and how many tokens the
step added. The client publishes the outcomes, finds the drafts for them, waits where the policy
says so, and confirms what will be verified next. A request it has not seen before, or whose text
does not continue what it knows (a round without drafting, a resumed request), needs no special
call: it is added again, or the gap is published, whichever the draft can follow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.messages import ControlClient, endpoint
from vllm_ssd.metrics import TargetCounters
from vllm_ssd.rundir import table_path
from vllm_ssd.table import (
    ANSWER,
    BRANCH,
    DRAFTING,
    GIVEN_UP,
    LOST,
    NOWHERE,
    SpeculationTable,
    make_stamp,
)
from vllm_ssd.target.mailbox import Finding, TargetMailbox
from vllm_ssd.target.patience import Patience, WaitPolicy
from vllm_ssd.target.seats import Roster, Seat
from vllm_ssd.target.yields import Depths

if TYPE_CHECKING:
    from vllm.config import VllmConfig

POLL_S = 50e-6
UNSEEN = -1  # stands for the accepted length of a round that was not ours
# A draft that shows no sign of life for so long is not waited for. Longer than any one forward.
HEARTBEAT_LIMIT_NS = 5_000_000_000


@dataclass(frozen=True)
class Row:
    """A request that sampled in this step. tokens: int32 [length], its whole text, of which the
    last ``num_new`` came in this step. temperature: of its sampling."""

    request_id: str
    tokens: NDArray[np.int32]
    num_new: int
    temperature: float = 0.0


@dataclass(eq=False)
class Lookup:
    """One row's way through a step."""

    row: Row
    seat: Seat
    stamp: np.uint64
    accepted: int
    bonus: int
    finding: Finding


class SpeculationClient:
    """``exchange`` once a step; ``add`` and ``remove`` when requests come and go."""

    def __init__(
        self,
        table: SpeculationTable,
        control: ControlClient,
        policy: WaitPolicy,
        vocab_size: int,
        max_len: int,
    ):
        self._table = table
        self._policy = policy
        self._patience = Patience(policy, table)
        self._max_len = max_len
        self._mailbox = TargetMailbox(table, vocab_size)
        self._k = table.shape.k
        self._longest_gap = table.shape.tail // 2
        self._roster = Roster(control)
        self._seats = self._roster.seats
        self._free = list(range(table.shape.slots - 1, -1, -1))
        self._step = 0
        self.counters = TargetCounters(table)

    def add(self, request_id: str, tokens: Sequence[int], temperature: float = 0.0) -> None:
        """Let the draft read a new request's text while the target does."""
        self.remove(request_id)
        if not self._free:
            self.remove(min(self._seats, key=lambda name: self._seats[name].last_used))
        seat = self._roster.seat(request_id, self._free.pop(), tokens, temperature)
        seat.last_used = self._step

    def remove(self, request_id: str) -> None:
        """The request ended or was preempted."""
        seat = self._roster.leave(request_id)
        if seat is not None:
            self._free.append(seat.slot)

    def exchange(
        self,
        rows: Sequence[Row],
        batch: int | None = None,
        entries: Sequence[NDArray[np.int64]] = (),
    ) -> list[list[int]]:
        """Drafts for every row, 0..k of them, in order. batch: requests in the target's step, if
        there are others than these. entries: for every row [k, top_m], written: what its drafts
        were sampled from."""
        self._step += 1
        depths = self._patience.decide(len(rows) if batch is None else batch)
        lookups = [self._publish(row) for row in rows]
        first = [lookup.finding for lookup in lookups]
        self._wait(lookups, depths)
        drafts = []
        for lookup, before in zip(lookups, first):
            found = lookup.finding.tokens[: self._room(lookup.row)]
            self._mailbox.confirm(lookup.seat.slot, lookup.stamp, found)
            self.counters.lookup(before, self._policy.min_depth, len(found))
            source = BRANCH if lookup.finding.predicted else ANSWER
            lookup.seat.source, lookup.seat.depth = source if found else NOWHERE, len(found)
            drafts.append(found)
        for of_row, lookup, found in zip(entries, lookups, drafts):
            of_row[: len(found)] = lookup.finding.entries[: len(found)]
        self.counters.log()
        return drafts

    def _publish(self, row: Row) -> Lookup:
        seat = self._seat_of(row)
        length = len(row.tokens)
        new = row.tokens[seat.length :].tolist()
        # A text that grew by more than this step's tokens had a round without us: nothing that
        # was predicted can be its outcome.
        accepted = row.num_new - 1 if len(new) == row.num_new else UNSEEN
        stamp = make_stamp(seat.generation, seat.round)
        self._mailbox.publish(seat.slot, stamp, length, accepted, new)
        if seat.round and accepted != UNSEEN:  # the first outcome ends the prompt
            self.counters.verified(accepted, seat.source, seat.depth)
        seat.length = length
        seat.round += 1
        seat.last_used = self._step
        finding = self._mailbox.find(seat.slot, stamp, accepted, new[-1])
        return Lookup(row, seat, stamp, accepted, new[-1], finding)

    def _seat_of(self, row: Row) -> Seat:
        """The row's seat, a new one if it has none that fits its text."""
        seat = self._seats.get(row.request_id)
        if seat is not None:
            grown = len(row.tokens) - seat.length
            lost = self._mailbox.draft_state(seat.slot, seat.generation) == LOST
            if 0 < grown <= self._longest_gap and not lost:
                return seat
        known = row.tokens[: len(row.tokens) - row.num_new].tolist()
        self.add(row.request_id, known, row.temperature)
        return self._seats[row.request_id]

    def _wait(self, lookups: Sequence[Lookup], depths: Depths) -> None:
        """Look again and again at the rows with too few drafts, until all have enough."""
        waiting = [lookup for lookup in lookups if self._worth_waiting(lookup, depths)]
        if not waiting:
            return
        started = time.monotonic()
        deadline = started + self._policy.max_wait_s
        while waiting and time.monotonic() < deadline:
            time.sleep(POLL_S)
            for lookup in waiting:
                lookup.finding = self._mailbox.find(
                    lookup.seat.slot, lookup.stamp, lookup.accepted, lookup.bonus
                )
            waiting = [lookup for lookup in waiting if self._worth_waiting(lookup, depths)]
        for lookup in waiting:
            lookup.seat.overdue = lookup.stamp
        self.counters.waited(time.monotonic() - started, len(waiting))

    def _worth_waiting(self, lookup: Lookup, depths: Depths) -> bool:
        seat, finding = lookup.seat, lookup.finding
        missed = finding.published and not finding.predicted
        enough = depths.answer if missed else depths.branch
        if len(finding.tokens) >= min(enough, self._room(lookup.row)):
            return False
        if seat.overdue is not None and self._mailbox.newest(seat.slot) >= seat.overdue:
            seat.overdue = None
        state = self._mailbox.draft_state(seat.slot, seat.generation)
        hopeless = state in (GIVEN_UP, LOST)
        if not depths.answer:
            hopeless |= state != DRAFTING
        return seat.overdue is None and draft_lives(self._table) and not hopeless

    def _room(self, row: Row) -> int:
        """Drafts that still fit the target's longest text."""
        return max(0, min(self._k, self._max_len - len(row.tokens) - 1))


def draft_lives(table: SpeculationTable) -> bool:
    """Whether the draft has lately shown a sign of life."""
    return time.monotonic_ns() - int(table.draft["heartbeat"][0]) < HEARTBEAT_LIMIT_NS


class Connection(NamedTuple):
    """What a client begins with, in the order of its arguments."""

    table: SpeculationTable
    control: ControlClient
    policy: WaitPolicy
    vocab_size: int
    max_len: int


def connect(run_dir: Path, vllm_config: VllmConfig) -> Connection:
    """To the draft that the engine core has launched in ``run_dir``."""
    config: Any = vllm_config.speculative_config
    return Connection(
        SpeculationTable.open(table_path(run_dir)),
        ControlClient(endpoint(run_dir)),
        WaitPolicy(config.on_miss, config.min_depth, config.max_wait_ms / 1000),
        vllm_config.model_config.get_vocab_size(),
        vllm_config.model_config.max_model_len,
    )


def make_client(run_dir: Path, vllm_config: VllmConfig) -> SpeculationClient:
    """The client of a worker that looks up on the host."""
    return SpeculationClient(*connect(run_dir, vllm_config))
