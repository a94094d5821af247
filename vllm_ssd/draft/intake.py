"""Takes in what the targets published: outcomes, and which drafts they verify next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ssd.draft.budget import BranchBudget
from vllm_ssd.draft.executor import Executor
from vllm_ssd.draft.hidden_states import HiddenStates
from vllm_ssd.draft.moves import Move
from vllm_ssd.draft.request import Phase
from vllm_ssd.draft.requests import DraftRequests
from vllm_ssd.draft.served_table import ServedTable
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.table import DRAFTING, LOST, split_stamp


@dataclass(frozen=True)
class Intake:
    """Brings requests up to date with their targets, and tells the budget how rounds ended."""

    requests: DraftRequests
    budget: BranchBudget
    states: HiddenStates
    executor: Executor
    policy: DraftPolicy

    def take(self, tables: Sequence[ServedTable]) -> None:
        """Take in all that is new. A target publishes the requests of a step one by one, and this
        loop takes them in together."""
        while sum(map(self._take_outcomes, tables)) + self._take_decisions():
            pass

    def _take_outcomes(self, served: ServedTable) -> int:
        """Take in a table's new outcomes; returns their number."""
        taken = 0
        for slot, stamp in served.outcomes.unread():
            generation, round_ = split_stamp(stamp)
            request = self.requests.get(served, slot)
            if request is None and served.draft_states.get(slot, generation) > DRAFTING:
                served.outcomes.read(slot, stamp, 0)  # its request is gone: no look finds it again
            if request is None or generation != request.generation or round_ <= request.round:
                continue
            outcome = served.outcomes.read(slot, stamp, len(request.tokens))
            if outcome is None:
                continue  # overtaken while reading; the next look finds the newer one
            if not outcome.new_tokens:  # too far behind: the target has to send the text again
                self.requests.drop(request, LOST)
                continue
            branch = served.predictions.branch_of(slot, stamp, outcome.accepted, outcome.bonus)
            self.budget.outcome(request, outcome.accepted, outcome.bonus, branch)
            request.advance(round_, outcome.new_tokens, outcome.accepted)
            request.branch = branch
            self.requests.enter(request, Phase.DECIDING)
            self.requests.check_size(request)
            taken += 1
        return taken

    def _take_decisions(self) -> int:
        """Take in which drafts are verified next; returns the number of requests with a
        decision."""
        decided = []
        for request in self.requests.waiting(Phase.DECIDING):
            drafts = request.served.outcomes.read_drafts(request.slot, request.stamp)
            if drafts is not None:
                decided.append((request, drafts))
        moves: list[Move] = []
        for request, drafts in decided:
            move = request.decide(drafts, request.seen(self.states))
            if move is not None:
                moves.append(move)
            if self.policy.branches or request.unfed:
                self.requests.enter(request, Phase.FEEDING)
            else:
                request.name_kv()  # no further work for it would do that
                self.requests.await_outcome(request)
        self.executor.move(moves)
        return len(decided)
