"""The draft's work, one piece at a time.

``step`` looks at the table, picks the most urgent piece of work and starts it. On a CPU it is then
done; a GPU is kept a piece or two ahead, and publishes by itself. So an outcome never waits longer
than that, and branches of a round that is over are dropped at once. In order of urgency:

    almost   a few tokens that a request has yet to be shown before its outcome, which was not
             predicted, is answered: it is then answered with the others
    answer   one more draft for requests whose outcome was not predicted (the target may wait)
    late     one more token for branches of which one has come true (the target may wait)
    glue     show the model the bonus and the drafts being verified; predict the outcomes
    branch   one more token for every branch of every predicted outcome
    prefill  a chunk of a new text; also due after every glue, so that a busy draft admits them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vllm_ssd.draft.blocks import BlockPool, OutOfBlocks
from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.catalog import Catalog
from vllm_ssd.draft.model import BLOCK_SIZE, DraftModel
from vllm_ssd.draft.pace import Pace
from vllm_ssd.draft.publish import DraftMailbox, Publisher
from vllm_ssd.draft.request import DraftRequest, Phase
from vllm_ssd.draft.rounds import Round
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.draft.work import Work
from vllm_ssd.table import GIVEN_UP, LOST, PREPARING, SpeculationTable, split_stamp

# So long after the last piece of work the target may still be deciding because of it.
SETTLE_S = 200e-6


class DraftEngine:
    """Owns the requests, their KV blocks and the model's time."""

    def __init__(
        self,
        model: DraftModel,
        table: SpeculationTable,
        policy: DraftPolicy,
        publisher: Publisher,
    ):
        self.model = model
        self.policy = policy
        self.pool = BlockPool(model.num_blocks, BLOCK_SIZE)
        self._mailbox = DraftMailbox(table)
        self._counters = table.draft[0]
        self._budget = BranchBudget(policy)
        self._catalog = Catalog(model, publisher, policy, self._budget, table.shape.slots)
        self._pace = Pace(model.device, self._count)
        self._counters["in_flight"] = self._pace.in_flight
        self._work = Work(
            self._catalog, self._budget, self._mailbox, self._pace, policy, self._postpone
        )
        self._requests: dict[int, DraftRequest] = {}
        self._rounds: list[Round] = []
        self._answers: list[Round] = []
        self._prefill_due = False
        self._unknown = self._mailbox.unknown()

    def __len__(self) -> int:
        return len(self._requests)

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Build, choose and record now what would otherwise be at first use."""
        self._catalog.warm_up(progress)

    def take_over(self) -> None:
        """Have the target add all its requests again: another server has drafted for them."""
        self._mailbox.lose_all()

    def ask_for_unknown(self) -> None:
        """Have the target add requests again that it publishes outcomes of and that were never
        added here: a server that died took the message with it, or the queue had no room. To be
        called now and then, so that a message that is on its way is here at the next call."""
        before, self._unknown = self._unknown, self._mailbox.unknown()
        for slot in np.flatnonzero((self._unknown == before) & (before != 0)):
            self._mailbox.set_state(slot, int(before[slot]), LOST)

    def add(
        self, slot: int, generation: int, tokens: Sequence[int], temperature: float = 0.0
    ) -> None:
        """Draft for a request from now on; whoever had the slot before is gone."""
        self._drop(slot)
        request = DraftRequest(slot, generation, list(tokens), self.pool.table(), temperature)
        if self.policy.top_m:
            request.dice = np.random.default_rng((self.policy.seed, generation))
        self._requests[slot] = request
        self._mailbox.set_state(slot, generation, PREPARING)
        self._check_size(request)

    def remove(self, slot: int, generation: int) -> None:
        """Forget a request, unless its slot has been given on already. A GPU may still have a step
        of it to run, which need not wait."""
        request = self._requests.get(slot)
        if request is not None and request.generation == generation:
            self._drop(slot, GIVEN_UP)

    def step(self) -> bool:
        """One piece of work, if the device can take one; False if there is none."""
        if not self._pace.ready():
            return True
        while self._take_outcomes() + self._take_decisions():
            pass  # a step's requests are published one by one, and belong together
        self._counters["live"] = len(self._requests)
        self._counters["free_blocks"] = self.pool.num_free
        live = [r for r in self._requests.values() if r.admitted or self._admit(r)]
        missed = [r for r in live if self._is_missed(r)]
        answers = [r for r in missed if r.unfed() == 1]
        behind = [r for r in missed if r.unfed() > 1]
        almost = [r for r in behind if r.unfed() <= self.policy.k + 2]  # by a round at most
        feeding = [r for r in live if r.phase is Phase.FEEDING]
        glue_size = self.policy.k + 1 if self.policy.branches else 0
        glue = [r for r in feeding if r.unfed() <= glue_size]
        prefill = [r for r in feeding if r.unfed() > glue_size]
        if answers and not almost:  # those are answered with the others
            self._answers += self._work.answer(answers)
        if almost:
            self._work.feed(almost[0])
        elif (round_ := self._next(self._answers, self.policy.answer_depth)) is not None:
            self._work.grow(round_, "answer")
        elif (round_ := self._next(self._rounds, self.policy.k, late=True)) is not None:
            self._work.grow(round_, "branch")
        elif behind:
            self._work.feed(behind[0])
        elif prefill and self._prefill_due:
            self._prefill_due = False
            self._work.feed(prefill[0])
        elif glue and self._pace.idle_s() < SETTLE_S and any(r.awaited for r in live):
            pass  # their decision is about to come: one glue for all
        elif glue:
            self._prefill_due = True
            self._rounds += self._work.glue(glue)
        elif (round_ := self._next(self._rounds, self.policy.k)) is not None:
            self._work.grow(round_, "branch")
        elif prefill:
            self._work.feed(prefill[0])
        else:
            return False
        return True

    # What the target published

    def _take_outcomes(self) -> int:
        """Take in what rounds have yielded; how many there were."""
        taken = 0
        newest = self._mailbox.newest_stamps()
        for request in list(self._requests.values()):
            stamp = newest[request.slot]
            generation, round_ = split_stamp(stamp)
            if generation != request.generation or round_ <= request.round:
                continue
            outcome = self._mailbox.read_outcome(request.slot, stamp, len(request.tokens))
            if outcome is None:
                continue  # overtaken while reading; the next look finds the newer one
            if not outcome.new_tokens:  # too far behind: the target has to send the text again
                self._drop(request.slot, LOST)
                continue
            branch = self._mailbox.branch_of(request.slot, stamp, outcome.accepted, outcome.bonus)
            self._budget.outcome(request, outcome.accepted, branch)
            request.advance(round_, outcome.new_tokens, outcome.accepted)
            self._check_size(request)
            taken += 1
        return taken

    def _take_decisions(self) -> int:
        """Take in which drafts are verified next; of how many requests."""
        taken = 0
        for request in self._requests.values():
            if request.phase is Phase.DECIDING:
                drafts = self._mailbox.read_drafts(request.slot, request.stamp)
                if drafts is not None:
                    request.decide(drafts, self.policy.branches > 0)
                    taken += 1
        return taken

    def _is_missed(self, request: DraftRequest) -> bool:
        """Whether the target may wait for an answer that has yet to be begun."""
        deciding = request.phase is Phase.DECIDING and request.answer is None
        if not deciding or not self.policy.answer_depth:
            return False
        if request.ahead is not None:
            branch = self._mailbox.branch_of(
                request.slot, request.stamp, request.accepted, request.tokens[-1]
            )
            if branch != -1:
                return False  # its branch is there or on its way
            request.leave_ahead()
        return True

    def _next(self, rounds: list[Round], depth: int, late: bool = False) -> Round | None:
        """The oldest of these rounds that somebody wants more of, or, if ``late``, that the target
        may wait for; ended ones are forgotten."""
        rounds[:] = [r for r in rounds if not r.empty and r.step < depth]
        for round_ in rounds:
            deciding = {row.phase is Phase.DECIDING for row in round_.rows if row is not None}
            awaited = True in deciding and round_.step < self.policy.answer_depth
            if awaited or (False in deciding and not late):
                return round_
        return None

    # Requests that cannot go on

    def _check_size(self, request: DraftRequest) -> None:
        """Give up a request that the draft has no positions, or never has the memory, for."""
        text = len(request.tokens)
        too_long = text + 2 * self.policy.k + 1 > self.model.max_len
        if too_long or self.pool.blocks_for(text + self.policy.scratch) > self.pool.num_blocks:
            self._drop(request.slot, GIVEN_UP)

    def _admit(self, request: DraftRequest) -> bool:
        """Begin with a text once there is room for all of it and for its branches."""
        try:
            request.table.reserve(len(request.tokens) + self.policy.scratch)
        except OutOfBlocks:
            return False
        request.admitted = True
        return True

    def _postpone(self, request: DraftRequest) -> None:
        """It has outgrown the memory there is: it waits, and begins again from its text."""
        request.forget_kv()
        request.admitted = False
        self._mailbox.set_state(request.slot, request.generation, PREPARING)

    def _drop(self, slot: int, state: int = PREPARING) -> None:
        request = self._requests.pop(slot, None)
        if request is None:
            return
        request.forget_kv()
        self._mailbox.clear(slot)
        self._mailbox.set_state(slot, request.generation, state)

    def _count(self, work: str, amount: int, microseconds: int) -> None:
        self._counters[work] += amount
        self._counters[f"{work}_us"] += microseconds
