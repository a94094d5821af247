"""The draft's work, one piece at a time: which piece is most urgent, and whether there is memory.

``step`` reads the table and starts the most urgent piece of work. On a CPU the piece is then done;
a GPU has up to two pieces in flight and publishes by itself, so that a new outcome waits for two
pieces at most. Branches of a round that is over are not grown any more. Requests of all tables are
treated alike and share batches; where a target does without drafts, its requests wait. In order of
urgency:

    nearly    up to k + 1 tokens to show for requests whose outcome was not predicted, before their
              fallbacks, which are then grown together with those of other requests
    fallback  one more draft for requests whose outcome was not predicted (the target may wait)
    late      one more token for branches of which one has come true (the target may wait)
    behind    a chunk of what is to be shown in the same way, where that is more
    glue      show the model what it has not seen of the bonus and the drafts being verified, which
              is nothing if it has grown them and had the time; predict the outcomes
    branch    one more token for every branch of every predicted outcome
    prefill   a chunk of one new text or of several; after every glue one goes first, lest new
              ones never start
    last      show the model the last tokens of all branches
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.executor import Executor
from vllm_ssd.draft.glue import make_glue
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.in_flight import InFlight
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.program_cache import ProgramCache
from vllm_ssd.draft.request import DraftRequest, Phase, Seen
from vllm_ssd.draft.requests import DraftRequests
from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.draft.tree_batch import TreeBatch
from vllm_ssd.table import LOST, SpeculationTable, TableShape, split_stamp
from vllm_ssd.table.publisher import Publisher

# Seconds after a piece of work in which the target may still decide on the tokens it published.
SETTLE_S = 200e-6


class DraftEngine:
    """``requests``: those it drafts for; tables: those they are in, none until one joins. seats:
    the requests that it drafts for at a time, at most; others wait."""

    def __init__(self, model: DraftModel, policy: DraftPolicy, publisher: Publisher, seats: int):
        self.model = model
        self.policy = policy
        self.tables: list[ServedTable] = []
        self.requests = DraftRequests(model, policy, seats)
        self._publisher = publisher
        self._budget = BranchBudget(policy)
        self._states = HiddenStates(model, policy, seats)
        self._programs = ProgramCache(model, self._states, publisher, policy, self._budget, seats)
        self._in_flight = InFlight(model.device, self._count)
        self._executor = Executor(self._programs, self._in_flight, policy)
        self._ahead: list[TreeBatch] = []  # branches of predicted outcomes, oldest first
        self._fallbacks: list[TreeBatch] = []
        self._prefill_due = 0  # tokens of new texts that go before the next glue

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Build, tune and record all programs now instead of at their first use."""
        self._programs.warm_up(progress)

    def join(self, table: SpeculationTable) -> ServedTable:
        """Serve a table from now on. ``ValueError`` with a sentence if it is not one for this
        draft; raises as the publisher, too."""
        ours = self.policy.table_shape(table.shape.slots)
        if replace(table.shape, tail=ours.tail) != ours:
            raise ValueError(
                f"the speculation table is made for {_words(table.shape)}, the draft for "
                f"{_words(ours)}: start the engine with the k, f, draft_sample_method and "
                "draft_top_m of the draft"
            )
        self._publisher.join(table)
        served = ServedTable(table)
        served.counters["live"], served.counters["blocks"] = 0, self.model.num_blocks
        self.tables.append(served)
        return served

    def leave(self, served: ServedTable) -> None:
        """Serve a table no longer and forget its requests. Nothing writes to it any more when this
        returns; raises as ``InFlight.finish``."""
        self.tables.remove(served)
        self._in_flight.finish()
        self.requests.drop_all(served)
        self._publisher.leave(served.table)

    def step(self) -> bool:
        """Start one piece of work, if the device can take one; False if there is none to do."""
        if not self._in_flight.ready():
            return True
        while sum(map(self._take_outcomes, self.tables)) + self._take_decisions():
            pass  # the target publishes a step's requests one by one: take them in together
        for served in self.tables:
            served.counters["free_blocks"] = self.requests.pool.num_free
        live = [r for r in self.requests.admitted() if not r.served.idle]
        missed = [r for r in live if self._is_missed(r)]
        behind = [r for r in missed if r.unfed > 1]
        nearly = [r for r in behind if r.unfed <= self.policy.k + 2]  # by a round at most
        feeding = [r for r in live if r.phase is Phase.FEEDING]
        glue_size = self.policy.k + 1 if self.policy.branches else 0
        glue = [r for r in feeding if r.unfed <= glue_size]
        prefill = [r for r in feeding if r.unfed > glue_size]
        if not nearly:  # else they get fallbacks together
            self._plant_fallbacks([r for r in missed if r.unfed == 1])
        if nearly:
            self._feed(nearly)
        elif (batch := self._next(self._fallbacks)) is not None:
            self._executor.grow(batch, "fallback")
        elif (batch := self._next(self._ahead, late=True)) is not None:
            self._executor.grow(batch, "branch")
        elif behind:
            self._feed(behind)
        elif prefill and self._prefill_due > 0:
            self._prefill_due -= self._feed(prefill)
        elif glue and self._in_flight.idle_s() < SETTLE_S and self._settles(glue[0].served):
            pass  # their decision is about to come: one glue for all
        elif glue:
            self._prefill_due = self.policy.chunk
            self._glue(glue)
        elif (batch := self._next(self._ahead)) is not None:
            self._executor.grow(batch, "branch")
        elif prefill:
            self._feed(prefill)
        elif (batch := self._last()) is not None:
            self._executor.grow(batch, "branch")
        else:
            return False
        return True

    def _feed(self, requests: Sequence[DraftRequest]) -> int:
        """Show the model a chunk of the first of these texts, or of several, without the tokens a
        glue or a fallback begins with; returns the number of its tokens."""
        wanted = [r.unfed - self._kept(r) for r in requests]
        program = self._programs.chunk(wanted)
        counts = {r: min(count, program.queries) for r, count in zip(requests, wanted)}
        fitting = self.requests.reserve(requests[: program.batch], counts.__getitem__)
        if fitting:
            self._executor.feed(program, fitting, [counts[r] for r in fitting])
            for request in fitting:
                if request.unfed == 0:
                    self.requests.await_outcome(request)
        return sum(counts[r] for r in fitting)

    def _kept(self, request: DraftRequest) -> int:
        """Tokens that its glue or fallback begins with."""
        whole = request.phase is Phase.FEEDING and not self.policy.branches
        return 0 if whole else 1 + len(request.drafts)

    def _glue(self, requests: Sequence[DraftRequest]) -> None:
        most = self._programs.max_batch
        fitting = self.requests.reserve(requests[:most], lambda request: request.unfed)
        if not fitting:
            return
        feeds = self._programs.feeds([request.unfed for request in fitting])
        size = self._programs.batch(len(fitting))
        batches = -(-len(self.requests) // most)
        shape = self._budget.shape(size, self._programs.feeds_us(feeds), batches)
        steps = self.policy.tree_steps
        glues = []
        for request in fitting:
            has_room = request.table.reserve(
                len(request.fed) + request.unfed + steps * sum(shape.fan_out)
            )
            verified = self._states.verified(request.seat, 1 + len(request.drafts))
            glues.append(make_glue(request, shape, verified, steps, has_room))
            self.requests.await_outcome(request)
        planned = Counter(glue.request.served for glue in glues if glue.prediction is not None)
        for served, count in planned.items():
            served.counters["planned"] += count
            served.counters["branches"] += count * sum(shape.fan_out)
        self._ahead.append(self._executor.glue(glues, feeds, shape))

    def _plant_fallbacks(self, requests: Sequence[DraftRequest]) -> None:
        most = self._programs.max_batch
        fitting = self.requests.reserve(requests[:most], lambda _: self.policy.tree_steps)
        if fitting:
            self._fallbacks.append(self._executor.fallback(fitting))

    def _next(self, batches: list[TreeBatch], late: bool = False) -> TreeBatch | None:
        """The oldest of these batches that has a request in need of more tokens, or, if ``late``,
        one whose target may wait for them. Drops batches that are complete or empty."""
        batches[:] = [b for b in batches if not b.empty and b.step <= b.steps]
        for batch in batches:
            deciding = {r.phase is Phase.DECIDING for r in self.requests if r.grows_in(batch)}
            awaited = True in deciding and self.policy.fallbacks
            if batch.step < batch.steps and (awaited or (False in deciding and not late)):
                return batch
        return None

    def _last(self) -> TreeBatch | None:
        """The oldest batch whose branches are complete and whose last tokens the model has yet to
        see, if any of its outcomes is still awaited."""
        for batch in self._ahead:
            growing = (r for r in self.requests if r.grows_in(batch))
            if batch.step == batch.steps and any(r.phase is Phase.IDLE for r in growing):
                return batch
        return None

    def _settles(self, served: ServedTable) -> bool:
        """Whether this table's target may be about to decide on drafts."""
        return any(r.awaited and r.served is served for r in self.requests)

    # What the targets published

    def _take_outcomes(self, served: ServedTable) -> int:
        """Take in a table's new outcomes; returns their number."""
        taken = 0
        for slot, number in served.outcomes.unread():
            stamp = np.uint64(number)
            generation, round_ = split_stamp(number)
            request = self.requests.get(served, slot)
            if request is None or generation != request.generation or round_ <= request.round:
                continue
            outcome = served.outcomes.read(slot, stamp, len(request.tokens))
            if outcome is None:
                continue  # overtaken while reading; the next look finds the newer one
            if not outcome.new_tokens:  # too far behind: the target has to send the text again
                self.requests.drop(request, LOST)
                continue
            branch = served.predictions.branch_of(slot, stamp, outcome.accepted, outcome.bonus)
            self._budget.outcome(request, outcome.accepted, outcome.bonus, branch)
            request.advance(round_, outcome.new_tokens, outcome.accepted)
            request.came_true = branch is not None and branch >= 0
            self.requests.check_size(request)
            taken += 1
        return taken

    def _take_decisions(self) -> int:
        """Take in which drafts are verified next; returns the number of requests it is for."""
        taken = 0
        moves = []
        for request in self.requests:
            if request.phase is Phase.DECIDING:
                drafts = request.served.outcomes.read_drafts(request.slot, request.stamp)
                if drafts is not None:
                    row, predicted = request.ahead, request.predicted
                    if request.came_true and row and predicted and not request.left_over:
                        self._budget.taken(row.batch.size, len(drafts) >= predicted.steps)
                    pairs = request.decide(drafts, self._seen(request))
                    if pairs:
                        moves.append((request.table.blocks, pairs))
                    if not request.unfed and not self.policy.branches:
                        self.requests.await_outcome(request)
                    taken += 1
        if moves:
            self._executor.move(moves)
        return taken

    def _seen(self, request: DraftRequest) -> Seen | None:
        """What the model has seen of the tokens after the request's text."""
        slot, stamp, bonus = request.slot, request.stamp, request.tokens[-1]
        published = request.served.predictions
        if request.left_over is not None:
            return request.left_over
        if request.fallback is not None:
            tokens = published.fallback_tokens(slot, stamp)
            row, branch = request.fallback, 0
        elif request.ahead is not None and request.came_true:
            branch = published.branch_of(slot, stamp, request.accepted, bonus) or 0
            tokens = published.branch_tokens(slot, stamp, branch)
            row = request.ahead
        else:
            return None
        entries = row.entries(branch)
        states = self._states.branch(request.seat, branch, len(entries))
        return Seen([bonus, *tokens], entries, states)

    def _is_missed(self, request: DraftRequest) -> bool:
        """Whether the target may wait for a fallback of this request that is not begun yet."""
        deciding = request.phase is Phase.DECIDING and request.fallback is None
        if not deciding or not self.policy.fallbacks:
            return False
        if request.ahead is not None:
            branch = request.served.predictions.branch_of(
                request.slot, request.stamp, request.accepted, request.tokens[-1]
            )
            if branch != -1:
                return False  # its branch is there or on its way
            request.leave_ahead()
        return request.left_over is None

    def _count(self, work: str, amount: int, microseconds: int) -> None:
        for served in self.tables:
            served.counters[work] += amount
            served.counters[f"{work}_us"] += microseconds


def _words(shape: TableShape) -> str:
    probabilities = shape.top_m or "no"
    return (
        f"k={shape.k}, {shape.branches} branches a round and {probabilities} probabilities a draft"
    )
