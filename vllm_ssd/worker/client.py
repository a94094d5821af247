"""The target's side of a round, on the host. Runs on TP rank 0 only.

Each step, the runner hands over the text of every request that sampled, and how many tokens the
step added. The client publishes the outcomes, finds their draft tokens, waits where the policy says
so, and confirms what will be verified next. New requests need no special call; nor do requests with
a gap in the known text (a round without drafting, a resumed request). The client publishes the gap
if the draft can follow it, else it adds the request again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.metrics import TargetCounters
from vllm_ssd.table import DRAFTING, GIVEN_UP, LOST, make_stamp
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.outcomes import OutcomeWriter
from vllm_ssd.table.predictions import LookupResult, PredictionReader
from vllm_ssd.table.service_state import draft_lives
from vllm_ssd.worker.connection import Connection
from vllm_ssd.worker.draft_limit import MOST_DRAFTS
from vllm_ssd.worker.draft_sampling import CERTAIN, DraftSampling
from vllm_ssd.worker.slots import SlotMap, SlotState
from vllm_ssd.worker.waiting import WaitPlan, WaitPlanner

POLL_S = 50e-6  # seconds between two looks at the table
UNSEEN = -1  # published as accepted length if the text also grew in rounds without this client


@dataclass(frozen=True)
class Row:
    """A request that sampled in this step. tokens: int32 [length], its whole text; the last
    ``num_new`` came in this step. sampling: how its draft tokens are sampled."""

    request_id: str
    tokens: NDArray[np.int32]
    num_new: int
    sampling: DraftSampling = CERTAIN


@dataclass(eq=False)
class RowState:
    """A row during a step. stamp, accepted, bonus: its outcome. found: the latest lookup's
    result."""

    row: Row
    slot: SlotState
    stamp: np.uint64
    accepted: int
    bonus: int
    found: LookupResult

    def ready(self, room: int) -> tuple[Sequence[int], NDArray[np.int64]]:
        """Return n <= ``room`` ready draft tokens, and int64 [n, top_m] distributions."""
        left, found = self.slot, self.found
        if len(left.drafts) > min(len(found.tokens), room):
            return left.drafts[:room], left.draft_probs[:room]
        return found.tokens[:room], found.draft_probs[:room]


class SpeculationClient:
    """Finds draft tokens. Call ``exchange`` once a step, ``add`` and ``remove`` per request."""

    def __init__(self, connection: Connection):
        table = connection.table
        self._table = table
        self._max_wait_s = connection.policy.max_wait_s
        self._planner = WaitPlanner(connection.policy, table)
        self._max_len = connection.max_len
        self._outcomes = OutcomeWriter(table)
        self._predictions = PredictionReader(table, connection.vocab_size)
        self._draft_states = DraftStates(table)
        self._k = table.shape.k
        self._longest_gap = table.shape.tail // 2
        self.slots = SlotMap(connection)
        self._free = list(range(table.shape.slots - 1, -1, -1))
        self._step = 0
        self.counters = TargetCounters(table)

    def add(
        self, request_id: str, tokens: Sequence[int], sampling: DraftSampling = CERTAIN
    ) -> None:
        """Let the draft read a new request's text while the target does."""
        self.remove(request_id)
        states = self.slots.states
        if not self._free:
            self.remove(min(states, key=lambda name: states[name].last_used))
        state = self.slots.assign(request_id, self._free.pop(), tokens, sampling)
        state.last_used = self._step

    def remove(self, request_id: str) -> None:
        """Free the slot of a request that ended or was preempted."""
        state = self.slots.release(request_id)
        if state is not None:
            self._free.append(state.slot)

    def exchange(
        self, rows: Sequence[Row], batch: int = 1, most_drafts: int = MOST_DRAFTS
    ) -> list[list[int]]:
        """Return draft tokens for every row, 0..k each, in order. ``slots`` has their
        distributions. batch: requests in the target's step. most_drafts: of a row, at most."""
        self._step += 1
        plan = self._planner.plan(batch).at_most(most_drafts)
        if not most_drafts:
            # Publishes nothing, so that the draft idles. It reads later what it missed.
            self.counters.went_without(len(rows))
            self.counters.log()
            return [[] for _ in rows]
        states = [self._publish(row) for row in rows]
        first_looks = [state.found for state in states]
        self._wait(states, plan)
        drafts = []
        for state, first in zip(states, first_looks):
            slot = state.slot
            slot.drafts, slot.draft_probs = state.ready(self._room(state.row))
            some = list(slot.drafts[:most_drafts])
            slot.handed_over = len(some)
            self._outcomes.confirm(slot.slot, state.stamp, some)
            self.counters.looked_up(first, len(some))
            drafts.append(some)
        self.counters.log()
        return drafts

    def _publish(self, row: Row) -> RowState:
        """Publish a row's outcome and look it up for the first time."""
        slot = self._slot_of(row)
        length = len(row.tokens)
        new = row.tokens[slot.length :].tolist()
        # A text that grew by more than this step's tokens had rounds without this client. No
        # prediction can match its outcome.
        accepted = row.num_new - 1 if len(new) == row.num_new else UNSEEN
        stamp = make_stamp(slot.generation, slot.round)
        self._outcomes.publish(slot.slot, stamp, length, accepted, new)
        if slot.round and accepted != UNSEEN:  # the first outcome ends the prompt
            self.counters.verified(accepted, slot.handed_over)
        slot.keep_left_over(accepted, new[-1])
        slot.length = length
        slot.round += 1
        slot.last_used = self._step
        found = self._predictions.find(slot.slot, stamp, accepted, new[-1])
        return RowState(row, slot, stamp, accepted, new[-1], found)

    def _slot_of(self, row: Row) -> SlotState:
        """Return the row's slot; assign a new one if it has none that fits its text."""
        state = self.slots.states.get(row.request_id)
        if state is not None:
            grown = len(row.tokens) - state.length
            lost = self._draft_states.get(state.slot, state.generation) == LOST
            if 0 < grown <= self._longest_gap and not lost:
                return state
        self.add(row.request_id, row.tokens[: len(row.tokens) - row.num_new].tolist(), row.sampling)
        return self.slots.states[row.request_id]

    def _wait(self, states: Sequence[RowState], plan: WaitPlan) -> None:
        """Look up the rows worth waiting for every ``POLL_S`` seconds, until none is left or the
        longest wait is over."""
        waiting = [state for state in states if self._worth_waiting(state, plan)]
        if not waiting:
            return
        started = time.monotonic()
        while waiting and time.monotonic() < started + self._max_wait_s:
            time.sleep(POLL_S)
            for state in waiting:
                state.found = self._predictions.find(
                    state.slot.slot, state.stamp, state.accepted, state.bonus
                )
            waiting = [state for state in waiting if self._worth_waiting(state, plan)]
        for state in waiting:
            state.slot.overdue = state.stamp
        self.counters.waited(time.monotonic() - started, len(waiting))

    def _worth_waiting(self, state: RowState, plan: WaitPlan) -> bool:
        slot, found = state.slot, state.found
        enough = plan.fallback if found.missed else plan.branch
        if len(found.tokens) >= min(enough, self._room(state.row)):
            return False
        if slot.drafts:  # left over
            return False  # the draft makes no others for this round
        if slot.overdue is not None and self._predictions.newest(slot.slot) >= slot.overdue:
            slot.overdue = None
        said = self._draft_states.get(slot.slot, slot.generation)
        hopeless = said in (GIVEN_UP, LOST)
        if not self._planner.waits_for_texts:
            hopeless |= said != DRAFTING
        if slot.round == 1 and not self._planner.waits_for_texts:
            return False  # first tokens do not wait
        return slot.overdue is None and draft_lives(self._table) and not hopeless

    def _room(self, row: Row) -> int:
        """Return how many draft tokens still fit the target's longest text, 0..k."""
        return max(0, min(self._k, self._max_len - len(row.tokens) - 1))
