"""How many branches a round gets, at which accepted lengths, and how many tokens each.

With more branches a round misses less often, and with more tokens the target accepts more; both
take time. With many requests a round gets fewer of both. Of the shapes that are done in time, it
gets the one that yields the most. Start-up measures what rounds take. Their time is that of the
target's verification, or less if the draft has other work (``window.py``).

Branches go where outcomes are likely (``outcome_probs.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_ssd.draft.fan_out import shrink
from vllm_ssd.draft.outcome_probs import OutcomeProbs
from vllm_ssd.draft.request import DraftRequest
from vllm_ssd.draft.spec import DraftPolicy
from vllm_ssd.draft.window import Window

# Shapes of rounds are chosen anew after this number of outcomes of each request. A GPU waits for
# that between a hit and its next branches, 60 to 200 us. (It waits 40 to 120 us for fan-outs.)
_SAME_SHAPES = 8
_FEWEST = 4  # branches that each request gets at least, where only their sum counts
_SIXTHS = (6, 4, 2, 1)  # sizes of rounds, in sixths of the largest
_NEWEST = 0.1  # weight of the newest step in what a step costs


class RoundCost(NamedTuple):
    """Microseconds of a round: to predict its outcomes, and to add a token to all branches."""

    predict_us: float
    step_us: float


class RoundShape(NamedTuple):
    """fan_out: branches for each accepted length 0..k, of a row of which only its number of drafts
    is known; steps: tokens of each branch, 1..k."""

    fan_out: tuple[int, ...]
    steps: int

    @property
    def branches(self) -> int:
        return sum(self.fan_out)


class BranchBudget:
    """Chooses the shapes of rounds. cost_us: what rounds cost, by requests and branches a request,
    filled in at start-up on a GPU. Without it, rounds are as large as the policy allows."""

    def __init__(self, policy: DraftPolicy):
        self._policy = policy
        self.cost_us: dict[tuple[int, int], RoundCost] = {}
        self._probs = OutcomeProbs(policy.k, policy.branches)
        self._news = 0
        # Both are cleared when shapes are chosen anew. The shapes that were chosen; and every shape
        # by requests, branches and tokens, with the probability that it does not miss.
        self._chosen: dict[tuple[Window, int, float, int], RoundShape] = {}
        self._shapes: dict[tuple[int, int, int], tuple[RoundShape, float]] = {}

    def sizes(self, requests: int) -> list[int]:
        """Branches that each of ``requests`` requests may get, most first; one choice at least."""
        fan_out = self._policy.fan_out
        most = min(self._policy.branches, self._policy.max_branches // requests)
        least = min(_FEWEST, self._policy.branches)
        sizes = {max(least, most * part // 6) for part in _SIXTHS}
        if not self._policy.adaptive:  # given numbers shrink in steps of several branches
            sizes = {sum(shrink(fan_out, size)) for size in sizes}
        return sorted(sizes, reverse=True)

    def took(self, requests: int, branches: int, step_us: int) -> None:
        """Take in the microseconds of a step. They depend on the texts' lengths and on sampling."""
        cost = self.cost_us.get((requests, branches))
        if cost is not None:
            now_us = cost.step_us + _NEWEST * (step_us - cost.step_us)
            self.cost_us[requests, branches] = cost._replace(step_us=now_us)

    def shape(
        self, window: Window, requests: int, feed_us: float = 0.0, batches: int = 1
    ) -> RoundShape:
        """The shape of a round of ``requests`` requests. window: the smallest window of their
        targets. feed_us: microseconds that it takes to show the model what it has not seen.
        batches: batches of that size that take turns."""
        if self._news >= _SAME_SHAPES * requests:
            self._news = 0
            self._chosen.clear()
            self._shapes.clear()
        if window.us(requests) == math.inf:
            return self._shape(requests, self.sizes(requests)[0], self._policy.k)[0]
        wanted = window, requests, feed_us, batches
        if wanted not in self._chosen:
            self._chosen[wanted] = self._choose(*wanted)
        return self._chosen[wanted]

    def fan_outs(
        self, shape: RoundShape, requests: int, token_probs: Sequence[Sequence[float]]
    ) -> Sequence[tuple[int, ...]]:
        """The fan-outs of a round of this shape, in a batch of ``requests``. token_probs: for each
        row, the draft's probability of each draft that is verified, nan if it is not known."""
        if not self._policy.adaptive:
            return [shape.fan_out] * len(token_probs)
        return self._probs.fan_outs(shape.branches, token_probs, requests)

    def _choose(self, window: Window, requests: int, feed_us: float, batches: int) -> RoundShape:
        limit_us = window.us(requests) / batches
        sizes = self.sizes(requests)
        steps = {size: self._steps(requests, size, limit_us - feed_us) for size in sizes}
        least = self._policy.k if self._policy.whole else 1
        fitting = [
            self._shape(requests, size, count) for size, count in steps.items() if count >= least
        ]
        if not fitting:
            return self._shape(requests, sizes[-1], least)[0]
        accepted = np.cumprod(self._probs.acceptance).cumsum()  # mean accepted length, by steps
        best, _ = max(fitting, key=lambda choice: choice[1] * accepted[choice[0].steps - 1])
        return best

    def _steps(self, requests: int, size: int, limit_us: float) -> int:
        """Tokens that each of ``size`` branches can have in the time, k at most."""
        if (requests, size) not in self.cost_us:
            return self._policy.k
        predict_us, step_us = self.cost_us[requests, size]
        return min(max(int((limit_us - predict_us) / step_us), 0), self._policy.k)

    def _shape(self, requests: int, size: int, steps: int) -> tuple[RoundShape, float]:
        """A round with ``size`` branches a request, and the probability that it does not miss."""
        key = requests, size, steps
        if key not in self._shapes:
            if self._policy.adaptive:
                fan_out = self._probs.fan_out(size, steps, requests)
            else:
                fan_out = shrink(self._policy.fan_out, size)
            hit = self._probs.hit(fan_out, steps, requests)
            self._shapes[key] = RoundShape(fan_out, steps), hit
        return self._shapes[key]

    def outcome(self, request: DraftRequest, accepted: int, bonus: int, branch: int | None) -> None:
        """Take in the outcome of a request's verification, before the request does. accepted: the
        accepted length; branch: the branch that predicted it, -1 if none did, None if that is not
        known."""
        self._news += 1
        drafts = request.drafts
        if not drafts or not 0 <= accepted <= len(drafts):
            return
        # A next draft that is the bonus was not verified: the target would have accepted it.
        left_over = accepted < len(drafts) and drafts[accepted] == bonus
        row, predicted = request.ahead, request.predicted
        requests = row.batch.size if row is not None else 1
        self._probs.count_drafts(request.token_probs, accepted, left_over, requests)
        if branch is not None and predicted is not None and not left_over:
            rank = predicted.ranks[branch] if branch >= 0 else None
            known = predicted.accepted.count(accepted)
            self._probs.count_bonus(accepted < len(drafts), rank, known)
        request.served.window.verified((time.monotonic_ns() - request.decided_ns) / 1000)
