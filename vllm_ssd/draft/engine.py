"""The draft's work, one piece at a time.

``step`` looks at the table, picks the most urgent piece of work and starts it. On a CPU it is then
done; a GPU is kept a piece or two ahead, and publishes by itself. So an outcome never waits longer
than that, and branches of a round that is over are dropped at once. In order of urgency:

    answer   one more draft for requests whose outcome was not predicted (the target may wait)
    glue     show the model the bonus and the drafts being verified; predict the outcomes
    branch   one more token for every branch of every predicted outcome
    prefill  a chunk of a new text; also due after every glue, so that a busy draft admits them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm_ssd.draft.attention.masks import Tree
from vllm_ssd.draft.blocks import BlockPool, OutOfBlocks
from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.catalog import Catalog
from vllm_ssd.draft.model import BLOCK_SIZE, DraftModel
from vllm_ssd.draft.outcomes import spread
from vllm_ssd.draft.pace import Pace
from vllm_ssd.draft.place import Place
from vllm_ssd.draft.programs import Prediction
from vllm_ssd.draft.publish import DraftMailbox, Publisher
from vllm_ssd.draft.request import DraftRequest, Phase
from vllm_ssd.draft.rounds import Round
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import DRAFTING, GIVEN_UP, LOST, PREPARING, SpeculationTable, split_stamp


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
        self._requests: dict[int, DraftRequest] = {}
        self._rounds: list[Round] = []
        self._answers: list[Round] = []
        self._prefill_due = False

    def __len__(self) -> int:
        return len(self._requests)

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Build, choose and record now what would otherwise be at first use."""
        self._catalog.warm_up(progress)

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
        self._take_outcomes()
        self._take_decisions()
        self._counters["live"] = len(self._requests)
        self._counters["free_blocks"] = self.pool.num_free
        live = [r for r in self._requests.values() if r.admitted or self._admit(r)]
        missed = [r for r in live if self._is_missed(r)]
        answers = [r for r in missed if r.unfed() == 1]
        behind = [r for r in missed if r.unfed() > 1]
        feeding = [r for r in live if r.phase is Phase.FEEDING]
        glue_size = self.policy.k + 1 if self.policy.branches else 0
        glue = [r for r in feeding if r.unfed() <= glue_size]
        prefill = [r for r in feeding if r.unfed() > glue_size]
        if answers:
            self._plant_answers(answers[: self._catalog.max_batch])
        answering = self._next(self._answers, self.policy.answer_depth)
        if answering is not None:
            with self._pace.timed("answer"):
                answering.grow()
        elif behind:
            self._feed(behind[0])
        elif prefill and self._prefill_due:
            self._feed(prefill[0])
        elif glue:
            self._glue(glue[: self._catalog.max_batch])
        elif (round_ := self._next(self._rounds, self.policy.k)) is not None:
            with self._pace.timed("branch"):
                round_.grow()
        elif prefill:
            self._feed(prefill[0])
        else:
            return False
        return True

    # What the target published

    def _take_outcomes(self) -> None:
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
            self._budget.outcome(request, outcome.accepted)
            request.advance(round_, outcome.new_tokens, outcome.accepted)
            self._check_size(request)

    def _take_decisions(self) -> None:
        for request in self._requests.values():
            if request.phase is Phase.DECIDING:
                drafts = self._mailbox.read_drafts(request.slot, request.stamp)
                if drafts is not None:
                    request.decide(drafts, self.policy.branches > 0)

    def _is_missed(self, request: DraftRequest) -> bool:
        """Whether the target may wait for an answer that has yet to be begun."""
        if request.phase is not Phase.DECIDING or not self.policy.answer_depth:
            return False
        if request.answer is not None:
            return False
        if request.ahead is not None:
            predicted = self._mailbox.is_predicted(
                request.slot, request.stamp, request.accepted, request.tokens[-1]
            )
            if predicted is not False:
                return False  # its branch is there or on its way
            request.leave_ahead()
        return True

    def _next(self, rounds: list[Round], depth: int) -> Round | None:
        """The oldest of these rounds that somebody wants more of; ended ones are forgotten."""
        rounds[:] = [r for r in rounds if not r.empty and r.step < depth]
        for round_ in rounds:
            rows = [row for row in round_.rows if row is not None]
            wait = round_.step < self.policy.answer_depth
            if any(row.phase is not Phase.DECIDING or wait for row in rows):
                return round_
        return None

    # Work

    def _plant_answers(self, requests: list[DraftRequest]) -> None:
        """A branch for each outcome that was not predicted: the bonus is known."""
        rows: list[DraftRequest | None] = []
        trees, places, tips = [], [], []
        for request in requests:
            try:
                trees.append(request.plant([len(request.fed)], self.policy.k))
            except OutOfBlocks:
                self._postpone(request)
                continue
            rows.append(request)
            places.append(request.place(int(request.stamp), 1, self.policy.k))
            tips.append(request.tokens[-1])
        if rows:
            program = self._catalog.answers(len(rows))
            answer = Round(program, rows, [*trees], places, torch.tensor(tips))
            for request in filter(None, rows):
                request.answer = answer
            self._answers.append(answer)

    def _feed(self, request: DraftRequest) -> None:
        """A chunk of a text, short of the tokens that a glue or an answer begins with."""
        self._prefill_due = False
        whole = request.phase is Phase.FEEDING and not self.policy.branches
        kept = 0 if whole else 1 + len(request.drafts)
        size = min(request.unfed() - kept, self.policy.chunk)
        try:
            chunk, tokens = request.feed(size)
        except OutOfBlocks:
            self._postpone(request)
            return
        program = self._catalog.chunk(size)
        with self._pace.timed("prefill", size):
            program.load([chunk], [tokens])
            program.run()
        if request.unfed() == 0:
            self._await_outcome(request)

    def _glue(self, requests: list[DraftRequest]) -> None:
        """Show what is verified now, predict what may come of it and plant a branch for each."""
        self._prefill_due = True
        shown = []
        for request in requests:
            try:
                shown.append((request, *request.feed(request.unfed())))
            except OutOfBlocks:
                self._postpone(request)
                continue
            self._await_outcome(request)
        if not shown:
            return
        batch = self._catalog.batch(len(shown))
        fan_out = self._budget.fan_out(batch)
        planted = [self._plant(request, fan_out, chunk.query_len) for request, chunk, _ in shown]
        program = self._catalog.glue(batch, sum(fan_out))
        with self._pace.timed("glue"):
            program.load(
                [chunk for _, chunk, _ in shown],
                [tokens for _, _, tokens in shown],
                [prediction for _, prediction in planted],
            )
            program.run()
        round_ = Round(
            self._catalog.branches(batch, program.branches),
            [r if tree else None for (r, *_), (tree, _) in zip(shown, planted)],
            [tree for tree, _ in planted],
            [
                r.place(p.stamp, program.branches, self.policy.k) if p else Place()
                for (r, *_), (_, p) in zip(shown, planted)
            ],
            program.bonus[: len(shown) * program.branches].clone(),
        )
        for request in filter(None, round_.rows):
            request.ahead = round_
        self._rounds.append(round_)

    def _plant(
        self, request: DraftRequest, fan_out: Sequence[int], shown: int
    ) -> tuple[Tree, Prediction] | tuple[None, None]:
        """A tree of branches, and what they are predicted from: the last of ``shown`` tokens."""
        counts = spread(fan_out, len(request.drafts))
        accepted = [length for length, count in enumerate(counts) for _ in range(count)]
        try:
            tree = request.plant([len(request.tokens) + j for j in accepted], self.policy.k)
        except OutOfBlocks:
            return None, None  # no drafting ahead; the next outcome is answered when it comes
        first = shown - len(counts)
        return tree, Prediction(
            request.slot,
            int(request.next_stamp),
            rows=[first + length for length in accepted],
            ranks=[rank for count in counts for rank in range(count)],
            accepted=accepted,
            ruled_out=[-1] * first + request.drafts + [-1],
        )

    def _await_outcome(self, request: DraftRequest) -> None:
        request.phase = Phase.IDLE
        self._mailbox.set_state(request.slot, request.generation, DRAFTING)

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
