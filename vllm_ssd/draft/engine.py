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

from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.executor import Executor
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.in_flight import InFlight
from vllm_ssd.draft.intake import Intake
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.program_cache import ProgramCache
from vllm_ssd.draft.request import DraftRequest, Phase
from vllm_ssd.draft.requests import DraftRequests
from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.draft.tree_batch import TreeBatch
from vllm_ssd.protocol import SpeculationTable, TableShape
from vllm_ssd.protocol.publisher import Publisher

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
        self._intake = Intake(self.requests, self._budget, self._states, self._executor, policy)
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
        served = ServedTable(table, self._publisher.join(table))
        served.counters["live"], served.counters["blocks"] = 0, self.model.num_blocks
        self.tables.append(served)
        return served

    def leave(self, served: ServedTable) -> None:
        """Serve a table no longer and forget its requests. Nothing writes to it any more when this
        returns; what another draft that has it by now has published stays. Raises as
        ``InFlight.finish``."""
        self.tables.remove(served)
        self._in_flight.finish()
        self.requests.drop_all(served)
        self._publisher.leave(served.table)

    def step(self) -> bool:
        """Start one piece of work, if the device can take one; False if there is none to do."""
        if not self._in_flight.ready():
            return True
        self._intake.take(self.tables)
        self.requests.admit()
        for served in self.tables:
            served.look(self.requests.pool.num_free)
        missed = self._missed()
        behind = [r for r in missed if r.unfed > 1]
        nearly = [r for r in behind if r.unfed <= self.policy.k + 2]  # by a round at most
        feeding = self.requests.at_work(Phase.FEEDING)
        glue_size = self.policy.k + 1 if self.policy.branches else 0
        glue: list[DraftRequest] = []
        prefill: list[DraftRequest] = []
        for request in feeding:
            (glue if request.unfed <= glue_size else prefill).append(request)
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
        unfed = [request.unfed for request in fitting]
        feeds = self._programs.feeds(unfed)
        size = self._programs.batch(len(fitting))
        batches = -(-len(self.requests) // most)
        windows = {request.served.window for request in fitting}
        smallest = min(windows, key=lambda window: window.us(size))
        shape = self._budget.shape(smallest, size, self._programs.feeds_us(feeds), batches)
        steps = self.policy.tree_steps
        tree_size = steps * sum(shape.fan_out)
        glues = []
        for request, count in zip(fitting, unfed):
            has_room = request.table.reserve(len(request.fed) + count + tree_size)
            verified = self._states.verified(request.seat, 1 + len(request.drafts))
            glues.append(request.glue(shape.fan_out, shape.steps, verified, steps, has_room))
            self.requests.await_outcome(request)
        planned = Counter(glue.request.served for glue in glues if glue.prediction is not None)
        for served, count in planned.items():
            served.count("planned", count)
            served.count("branches", count * sum(shape.fan_out))
        self._ahead.append(self._executor.glue(glues, feeds, shape))

    def _plant_fallbacks(self, requests: Sequence[DraftRequest]) -> None:
        most = self._programs.max_batch
        fitting = self.requests.reserve(requests[:most], lambda _: self.policy.tree_steps)
        if fitting:
            self._fallbacks.append(self._executor.fallback(fitting))

    def _missed(self) -> list[DraftRequest]:
        """Requests whose target may wait for a fallback that is not begun yet."""
        if not self.policy.fallbacks:
            return []
        deciding = self.requests.at_work(Phase.DECIDING)
        for request in deciding:
            if request.ahead is not None:
                if request.branch is None:
                    self._intake.find_branch(request)
                if request.branch == -1:
                    request.leave_ahead()
        # Of the others the branch is there or on its way.
        missed = (r for r in deciding if r.ahead is None and r.fallback is None)
        return [r for r in missed if r.left_over is None]

    def _next(self, batches: list[TreeBatch], late: bool = False) -> TreeBatch | None:
        """The oldest of these batches that has a request in need of more tokens, or, if ``late``,
        one whose target may wait for them. Drops batches that are complete or empty."""
        batches[:] = [b for b in batches if b.growing and b.step <= b.steps]
        for batch in batches:
            if batch.step < batch.steps:
                deciding = self._deciding(batch)
                if (deciding and self.policy.fallbacks) or (batch.growing > deciding and not late):
                    return batch
        return None

    def _last(self) -> TreeBatch | None:
        """The oldest batch whose branches are complete and whose last tokens the model has yet to
        see, if any of its outcomes is still awaited."""
        for batch in self._ahead:
            if batch.step == batch.steps and batch.growing > self._deciding(batch):
                return batch
        return None

    def _deciding(self, batch: TreeBatch) -> int:
        """Requests of a batch whose outcomes have come; those of the others are awaited."""
        return sum(r.grows_in(batch) for r in self.requests.waiting(Phase.DECIDING))

    def _settles(self, served: ServedTable) -> bool:
        """Whether this table's target may be about to decide on drafts."""
        deciding = self.requests.waiting(Phase.DECIDING)
        return any(r.grows and r.served is served for r in deciding)

    def _count(self, work: str, amount: int, microseconds: int) -> None:
        for served in self.tables:
            served.count(work, amount)
            served.count(f"{work}_us", microseconds)


def _words(shape: TableShape) -> str:
    probabilities = shape.top_m or "no"
    return (
        f"k={shape.k}, {shape.branches} branches a round and {probabilities} probabilities a draft"
    )
