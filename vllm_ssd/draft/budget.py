"""How many branches a round gets, and at which accepted lengths.

More branches miss less often and take longer. With many requests a round gets fewer of them, down
to what is done before the target has verified; both times are measured. Where they go follows the
latest outcomes: at which accepted length they came, and at which rank of the draft's bonus tokens.
"""

from __future__ import annotations

import time

import numpy as np

from vllm_ssd.draft.fan_out import allocate, shrink
from vllm_ssd.draft.programs import Prediction
from vllm_ssd.draft.request import DraftRequest
from vllm_ssd.draft.spec import DraftPolicy

# Weights of the newest outcome, and of the newest duration of a verification.
_OUTCOME, _WINDOW = 0.005, 0.1
# The part of a verification's duration that a round of the draft may take.
_SHARE = 0.95


class OutcomeProbs:
    """The probability of each outcome, by accepted length and rank of the bonus, from the latest
    outcomes mostly. branches: the most there can be, so that no rank beyond it matters."""

    def __init__(self, k: int, branches: int):
        # To begin with all lengths are alike, and the bonus is not among the F likeliest with
        # probability 1 / (F + 1): the power law of arXiv 2603.03251 with r = 1.
        rank = np.arange(branches + 1)
        self._by_rank = 1 / ((rank + 1) * (rank + 2))
        self._probs = np.tile(self._by_rank / (k + 1), (k + 1, 1))

    def fan_out(self, branches: int) -> tuple[int, ...]:
        """The fan-out of ``branches`` branches that misses least."""
        return allocate(branches, self._probs.tolist())

    def count(self, predicted: Prediction, accepted: int, branch: int) -> None:
        """An outcome came. accepted: drafts; branch: the one that came true, -1 if none has."""
        self._probs *= 1 - _OUTCOME
        row = self._probs[accepted]
        if branch >= 0:
            row[predicted.ranks[branch]] += _OUTCOME
        else:  # some rank beyond those predicted
            beyond = list(predicted.accepted).count(accepted)
            tail = self._by_rank[beyond:]
            row[beyond:] += _OUTCOME * tail / tail.sum()


class BranchBudget:
    """cost_us: microseconds that a whole round takes, by requests and branches a request; filled by
    whoever has measured it. Without, rounds are as large as the policy allows."""

    def __init__(self, policy: DraftPolicy):
        self._policy = policy
        self.cost_us: dict[tuple[int, int], float] = {}
        # Where the numbers are given, there is nothing to learn.
        self._probs = OutcomeProbs(policy.k, policy.branches) if policy.adaptive else None
        self._window_us = 0.0

    def sizes(self, requests: int) -> list[int]:
        """Branches that each of ``requests`` requests may get, most first; one choice at least."""
        fan_out = self._policy.fan_out
        most = min(self._policy.branches, self._policy.max_branches // requests)
        least = sum(count > 0 for count in fan_out)
        sizes = {max(least, most * part // 3) for part in (1, 2, 3)}
        if not self._policy.adaptive:  # given numbers shrink in steps of several branches
            sizes = {sum(shrink(fan_out, size)) for size in sizes}
        return sorted(sizes, reverse=True)

    def fan_out(self, requests: int) -> tuple[int, ...]:
        """Branches for each accepted length 0..k in a round of ``requests`` requests."""
        sizes = self.sizes(requests)
        limit = self._window_us * _SHARE
        fitting = [s for s in sizes if self.cost_us.get((requests, s), 0.0) <= limit]
        size = sizes[0] if not limit else max(fitting, default=sizes[-1])
        if self._probs is not None:
            return self._probs.fan_out(size)
        return shrink(self._policy.fan_out, size)

    def outcome(self, request: DraftRequest, accepted: int, branch: int | None) -> None:
        """A request's verification is over, and the request has yet to take it in. accepted:
        drafts; branch: the one that came true, -1 if none has, None if that is not known."""
        if len(request.drafts) < self._policy.k or not 0 <= accepted <= self._policy.k:
            return
        if self._probs is not None and branch is not None and request.predicted is not None:
            self._probs.count(request.predicted, accepted, branch)
        took = (time.monotonic_ns() - request.decided_ns) / 1000
        if self._window_us:
            # A step that did more than verify (a prompt, a pause) says little about the next.
            took = min(took, 2 * self._window_us)
            self._window_us += _WINDOW * (took - self._window_us)
        else:
            self._window_us = took
