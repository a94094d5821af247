"""Does the draft's work, one piece at a time: the most urgent piece for which there is memory.

``step`` reads the tables and starts the most urgent piece of work. On a CPU the piece is then done.
A GPU has up to two pieces in flight and publishes by itself, so a new outcome waits for at most two
pieces. Requests of all tables are treated alike and share all work. Requests wait while their
target does without drafts. In order of urgency:

    nearly    show the model up to k + 1 tokens of requests whose outcome was not predicted; their
              fallbacks come next, and grow together with all other branches
    glue      show the model what it has not seen of the bonus and the drafts being verified, which
              is nothing if it has grown them and had the time; predict the outcomes
    grow      one more token for every branch, if a target may wait for one
    behind    show a chunk of requests without a prediction that have more tokens to show
    prefill   show a chunk of one new text or of several, if none was shown since the last glue, so
              that new texts do start
    grow      one more token for every branch, or show the model their last tokens; also show it the
              bonus of requests that are verified without drafts, whose glue comes next
    prefill
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.executor import Executor
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.in_flight import InFlight
from vllm_ssd.draft.intake import Intake
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.program_cache import ProgramCache
from vllm_ssd.draft.programs import Draft
from vllm_ssd.draft.request import DraftRequest, Phase
from vllm_ssd.draft.requests import DraftRequests
from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import SpeculationTable, TableShape
from vllm_ssd.table.publisher import Publisher

# Seconds. For so long after a piece of work, the target may still decide on the tokens that the
# piece published.
SETTLE_S = 200e-6


class DraftEngine:
    """Drafts for ``requests``, those of the ``tables`` that have joined; there are none at first.
    seats: the most requests that it drafts for at a time; others wait."""

    def __init__(self, model: DraftModel, policy: DraftPolicy, publisher: Publisher, seats: int):
        self.model = model
        self.policy = policy
        self.tables: list[ServedTable] = []
        self.requests = DraftRequests(model, policy, seats)
        self._publisher = publisher
        self._budget = BranchBudget(policy, model.attention.crowded)
        self._states = HiddenStates(model, policy, seats)
        draft = Draft(model, self._states, publisher, policy)
        self._programs = ProgramCache(draft, self._budget, seats)
        self._in_flight = InFlight(model.device, self._count)
        self._executor = Executor(draft, self._programs, self._budget, self._in_flight)
        self._intake = Intake(self.requests, self._budget, self._states, self._executor, policy)
        self._seats = seats
        self._prefill_due = 0  # tokens of new texts that go before the next glue

    def warm_up(self) -> None:
        """Build, tune and record all programs now, before their first use."""
        self._programs.warm_up()

    def join(self, table: SpeculationTable) -> ServedTable:
        """Serve a table from now on. Raises ``ValueError`` with a sentence if the table is not made
        for this draft, and ``OSError`` if the publisher cannot reach it."""
        ours = self.policy.table_shape(table.shape.slots)
        if replace(table.shape, tail=ours.tail) != ours:
            raise ValueError(
                f"the speculation table is made for {_words(table.shape)}, the draft for "
                f"{_words(ours)}: start the engine with the k, f, draft_sample_method and "
                "draft_top_m of the draft"
            )
        served = ServedTable(table, self._publisher.join(table))
        served.counters["live"], served.counters["blocks"] = 0, self.model.num_blocks
        self.tables.append(served)
        return served

    def leave(self, served: ServedTable) -> None:
        """Stop serving a table and forget its requests. When this returns, nothing writes to the
        table any more. What another draft has published there stays. Raises ``TimeoutError`` if the
        GPU hangs."""
        self.tables.remove(served)
        self._in_flight.finish()
        self.requests.drop_all(served)
        self._publisher.leave(served.table)

    def step(self) -> bool:
        """Start one piece of work, if the device can take one; False if there is none to do."""
        if not self._in_flight.ready():
            return True
        self._intake.take(self.tables)
        for served in self.tables:
            served.look(self.requests.pool.num_free)
        self.requests.admit()
        missed = self._missed()
        behind = [r for r in missed if r.unfed > 1]
        nearly = [r for r in behind if r.unfed <= self.policy.k + 2]  # by one round at most
        glue_size = self.policy.k + 1 if self.policy.branches else 0
        glue: list[DraftRequest] = []
        prefill: list[DraftRequest] = []
        undrafted = []  # their target has decided on no drafts
        for request in self.requests.at_work(Phase.FEEDING):
            if request.tree is not None and request.tree.step:
                request.decide([], request.seen(self._states))  # the tree has shown the bonus
            if glue_size and self.policy.fallbacks and request.is_undrafted:
                undrafted.append(request)
            else:
                (glue if request.unfed <= glue_size else prefill).append(request)
        # After "nearly", all get fallbacks together.
        planted = [] if nearly else [r for r in missed if r.unfed == 1]
        # A glue would read all weights for the bonus alone, and the next step reads them anyway.
        planted += [r for r in undrafted if r.tree is None]
        self._plant_fallbacks(planted)
        growing = self._executor.growing
        if nearly:
            self._feed(nearly)
        elif glue and not self._settles(glue):
            self._prefill_due = self.policy.chunk
            self._glue(glue)
        elif growing.is_waited_for:
            self._executor.grow()
        elif behind:
            self._feed(behind)
        elif prefill and self._prefill_due > 0:
            self._prefill_due -= self._feed(prefill)
        elif glue:
            pass  # more decisions are about to come: one glue for all
        elif growing.lacks_tokens:
            self._executor.grow()
        elif prefill:
            self._feed(prefill)
        elif growing.can_grow:
            self._executor.grow()
        else:
            return False
        return True

    def _feed(self, requests: Sequence[DraftRequest]) -> int:
        """Show the model a chunk of the first of these texts, or of several, and return the number
        of its tokens. The tokens that a glue or a fallback begins with are left out."""
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
        """Tokens that the request's glue or fallback begins with."""
        whole = request.phase is Phase.FEEDING and not self.policy.branches
        return 0 if whole else 1 + len(request.drafts)

    def _glue(self, requests: Sequence[DraftRequest]) -> None:
        most = self._programs.max_batch
        fitting = self.requests.reserve(requests[:most], lambda request: request.unfed)
        if not fitting:
            return
        live = sum(served.live for served in self.tables if not served.idle)
        load = max(min(live, self._seats), self._programs.batch(len(fitting)))
        branches = self._budget.branches(load)
        tree_size = self.policy.tree_steps * branches
        has_room = [r.table.reserve(r.fed + r.unfed + tree_size) for r in fitting]
        self._executor.glue(fitting, branches, has_room)
        # What else there is to do comes now, while a GPU already works.
        for request in fitting:
            request.name_kv()
            self.requests.await_outcome(request)
        ahead = Counter(request.served for request in fitting if request.predicted)
        for served, count in ahead.items():
            served.count(drafted_ahead=count, branches=count * branches)

    def _plant_fallbacks(self, requests: Sequence[DraftRequest]) -> None:
        some = requests[: self._programs.max_batch]
        fitting = self.requests.reserve(some, lambda _: self.policy.tree_steps)
        if fitting:
            self._executor.fallback(fitting)

    def _missed(self) -> list[DraftRequest]:
        """Requests whose target may wait for a fallback that is not begun yet."""
        if not self.policy.fallbacks:
            return []
        deciding = self.requests.at_work(Phase.DECIDING)
        for request in deciding:
            if request.tree is not None:
                if request.branch is None:
                    request.find_branch()
                if request.branch == -1:
                    request.leave_tree()
        # The branches of the other requests are there or on their way.
        return [r for r in deciding if r.tree is None and r.left_over is None]

    def _settles(self, glue: Sequence[DraftRequest]) -> bool:
        """True if the target of the first of these may be about to decide on more drafts."""
        deciding = self.requests.waiting(Phase.DECIDING)
        return self._in_flight.idle_s() < SETTLE_S and any(
            r.tree is not None and r.served is glue[0].served for r in deciding
        )

    def _count(self, work: str, amount: int, microseconds: int) -> None:
        for served in self.tables:
            served.count(**{work: amount, f"{work}_us": microseconds})


def _words(shape: TableShape) -> str:
    probabilities = shape.top_m or "no"
    return (
        f"k={shape.k}, {shape.branches} branches a round and {probabilities} probabilities a draft"
    )
