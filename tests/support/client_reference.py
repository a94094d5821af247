"""What the target's client is to do, plainly."""

from dataclasses import dataclass

import numpy as np

from vllm_ssd.table import DRAFTING, GIVEN_UP, LOST, make_stamp
from vllm_ssd.table.draft_states import DraftStates
from vllm_ssd.table.predictions import PredictionReader
from vllm_ssd.worker.draft_sampling import DraftSampling


@dataclass
class Known:
    """A request that has a slot. tokens, sampling: as the draft is to be told, if it ``hears`` of
    them. drafts: all of the last round, of which vLLM got ``handed``; then those left over."""

    slot: int
    generation: int
    tokens: list
    sampling: DraftSampling
    length: int
    used: int
    hears: bool
    overdue: int | None
    round: int = 0
    drafts: tuple = ()
    handed: int = 0


@dataclass
class Lookup:
    """A row of a step. before: tokens of its text that the draft knows."""

    known: Known
    stamp: np.uint64
    outcome: tuple
    before: int
    room: int
    tokens: tuple = ()


class Reference:
    """Reads the table as the client is to. waiting: the rows that the step waits for now."""

    def __init__(self, table, wire, policy, vocab, max_len):
        self.table, self.wire, self.policy, self.max_len = table, wire, policy, max_len
        self.reader, self.states = PredictionReader(table, vocab), DraftStates(table)
        self.known, self.free, self.told = {}, list(range(table.shape.slots))[::-1], []
        self.step, self.lives, self.longest_gap = 0, False, table.shape.tail // 2

    def remove(self, name):
        if name in self.known:
            self.free.append(self.known.pop(name).slot)

    def add(self, name, tokens, sampling):
        self.remove(name)
        if not self.free:
            self.remove(min(self.known, key=lambda other: self.known[other].used))
        slot, generation = self.free.pop(), len(self.told) + 1
        hears = not self.wire.full and (self.lives or not self.table.draft["pid"][0])
        overdue = None if hears else int(make_stamp(generation, 0))
        of = slot, generation, tokens, sampling, len(tokens), self.step, hears, overdue
        self.known[name] = Known(*of)
        self.told.append(self.known[name])

    def begin(self, rows, plan):
        """A step of these rows begins, and looks for the first time."""
        self.rows, self.plan = [], plan
        for row in rows:
            text, known = row.tokens.tolist(), self.known.get(row.request_id)
            lost = known and self.states.get(known.slot, known.generation) == LOST
            if known is None or lost or not 0 < len(text) - known.length <= self.longest_gap:
                self.add(row.request_id, text[: -row.num_new], row.sampling)
                known = self.known[row.request_id]
            before, known.length, known.used = known.length, len(text), self.step
            accepted = row.num_new - 1 if len(text) - before == row.num_new else -1
            goes_on = accepted >= 0 and list(known.drafts[accepted : accepted + 1]) == text[-1:]
            known.drafts = known.drafts[accepted + 1 :] if goes_on else ()
            stamp, room = make_stamp(known.generation, known.round), self.max_len - len(text) - 1
            known.round += 1
            room = max(0, min(self.table.shape.k, room))
            self.rows.append(Lookup(known, stamp, (accepted, text[-1]), before, room))
        self.waiting = self.rows
        self.poll()

    def poll(self):
        self.waiting = [row for row in self.waiting if self._is_worth_waiting(row)]

    def _is_worth_waiting(self, row):
        known = row.known
        found = self.reader.find(known.slot, row.stamp, *row.outcome)
        row.tokens = found.tokens
        enough = self.plan.fallback if found.missed else self.plan.branch
        newest = max(self.table.slots["prediction"][known.slot]["stamp"].tolist())
        state = self.states.get(known.slot, known.generation)
        hopes = state not in (GIVEN_UP, LOST)
        if self.policy != "wait":
            hopes &= state == DRAFTING and known.round > 1
        if known.drafts or len(row.tokens) >= min(enough, row.room):
            return False
        if known.overdue is not None and newest >= known.overdue:
            known.overdue = None
        return hopes and self.lives and known.overdue is None

    def end(self, most):
        """What each row gets. Rows that waited in vain are not waited for again."""
        for row in self.waiting:
            row.known.overdue = int(row.stamp)
        for row in self.rows:
            known, left = row.known, row.known.drafts[: row.room]
            known.drafts = left if len(left) > len(row.tokens) else row.tokens[: row.room]
            known.handed = min(len(known.drafts), most)
        return [list(row.known.drafts[:most]) for row in self.rows]
