"""How many branches a request gets in a round, and at which accepted lengths.

With more branches a round misses less often. On a GPU, more of them cost little as long as a step
of the draft reads its weights for longer than it computes. So all requests share about as many
branches as that allows, which is measured at the start. Branches go where outcomes are likely
(``outcome_probs.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ssd.draft.fan_out import FanOuts
from vllm_ssd.draft.outcome_probs import OutcomeProbs
from vllm_ssd.draft.request import DraftRequest
from vllm_ssd.draft.spec import DraftPolicy

FEWEST = 4  # branches that each request gets at least, as long as a step has room for them


class BranchBudget:
    """Chooses the fan-outs of rounds, and learns from their outcomes. rows: the branches that all
    requests share. crowded: those that each gets at least if a step has no room for ``FEWEST``."""

    def __init__(self, policy: DraftPolicy, crowded: int):
        self._policy, self._crowded = policy, crowded
        self.rows = policy.max_branches
        self._probs = OutcomeProbs(policy.k, policy.branches)

    def branches(self, requests: int) -> int:
        """Branches of each request if the draft serves so many. There are few such numbers, because
        each needs programs: those with at most three bits that are not 0."""
        fewest = FEWEST if requests * FEWEST <= self._policy.max_branches else self._crowded
        fitting = max(self.rows // requests, fewest)
        step = 1 << max(fitting.bit_length() - 3, 0)
        return min(self._policy.branches, fitting // step * step)

    def shares(self, requests: int, most: int) -> list[int]:
        """What ``branches`` may be for so many requests or more, up to ``most``."""
        return sorted({self.branches(load) for load in range(requests, most + 1)})

    def fan_outs(self, branches: int, requests: Sequence[DraftRequest]) -> FanOuts:
        """The fan-outs of requests that are verified now. branches: from ``branches``."""
        top_probs = [request.top_probs for request in requests]
        loads = [request.served.live for request in requests]
        return FanOuts(self._probs.fan_outs(branches, top_probs, loads))

    def outcome(self, request: DraftRequest, accepted: int, bonus: int, branch: int | None) -> None:
        """Take in the outcome of a request's verification, before the request does. accepted: the
        accepted length; branch: the branch that predicted it, -1 if none did, None if that is not
        known."""
        drafts = request.drafts
        if not drafts or not 0 <= accepted <= len(drafts):
            return
        # A next draft that is the bonus was not verified: the target would have accepted it.
        left_over = accepted < len(drafts) and drafts[accepted] == bonus
        predicted = request.predicted
        load = request.tree.load if request.tree is not None else 1
        self._probs.count_drafts(request.top_probs, accepted, left_over, load)
        if branch is not None and predicted is not None and not left_over:
            rank = branch - sum(predicted[:accepted]) if branch >= 0 else None
            self._probs.count_bonus(accepted < len(drafts), rank, predicted[accepted])
